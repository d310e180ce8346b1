"""The report of a build, which accounts for every record, and limits on those that are rejected."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from rich.markup import escape
from rich.table import Table

from protlm.data.records.record import GAP, NUL, Tally
from protlm.data.shards.data_set import REJECTED, REPORT
from protlm.data.shards.manifest import Counts, Manifest, ShardEntry, SourceEntry
from protlm.data.shards.writer import write_clusters
from protlm.system.errors import InputDataError
from protlm.system.terminal import console, printable

from .families import families_without_records
from .split import TEST, VALID

_COLUMNS = ("reason", "identifier", "file", "line")
# NUL bytes are holes in a file that was never written completely.
_MAX_NUL_RATE = 0.001
# Fewer records are not representative of the input.
_ENOUGH_RECORDS = 100_000


@dataclass(frozen=True)
class SplitSummary:
    """The size of a split."""

    sequences: int
    residues: int
    shards: int


@dataclass(frozen=True)
class Report:
    """The records that a build read, kept and left out.

    `families_without_records` are held-out families without any record. `clusters` has the number
    of clusters of each split, and is empty if the data set does not store clusters.
    """

    sources: tuple[SourceEntry, ...]
    split_rule: dict[str, Any]
    splits: dict[str, SplitSummary]
    counts: Counts
    families_without_records: tuple[str, ...] = ()
    clusters: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        splits = {
            split: SplitSummary(
                sequences=sum(shard.sequences for shard in shards),
                residues=sum(shard.residues for shard in shards),
                shards=len(shards),
            )
            for split, shards in manifest.splits.items()
        }
        indexes = manifest.clusters.indexes if manifest.clusters else {}
        return cls(
            manifest.sources,
            manifest.split_rule,
            splits,
            manifest.counts,
            families_without_records(manifest.split_rule, manifest.counts.noted),
            {split: index.clusters for split, index in indexes.items()},
        )

    def write(self, directory: Path) -> None:
        fields = asdict(self)
        if not self.clusters:
            del fields["clusters"]
        text = json.dumps(fields, indent=1, sort_keys=True, ensure_ascii=False)
        (directory / REPORT).write_text(text + "\n", encoding="utf-8")

    def print(self) -> None:
        """Prints the table, and a warning for each empty split, on standard error."""
        console(stderr=True).print(self.table())
        fractions = self.split_rule.get("otherwise", self.split_rule)
        number = sum(split.sequences for split in self.splits.values())
        for split in (VALID, TEST):
            if (fraction := fractions.get(f"{split}_fraction", 0)) and split not in self.splits:
                print(
                    f"protlm: warning: split {split} is empty: {number:,} sequences at "
                    f"--{split}-fraction {fraction}; to have one, prepare them again with a larger "
                    f"--{split}-fraction",
                    file=sys.stderr,
                )

    def table(self) -> Table:
        table = Table("", "records", "residues", box=None)
        table.columns[1].justify = table.columns[2].justify = "right"
        table.add_row("read", f"{self.counts.records:,}", "")
        for name, split in sorted(self.splits.items()):
            table.add_row(f"split {name}", f"{split.sequences:,}", f"{split.residues:,}")
        for name, number in sorted(self.clusters.items()):
            table.add_row(f"clusters of {name}", f"{number:,}", "")
        for label, counts in self.counts.by_kind().items():
            for reason, number in sorted(counts.items()):
                table.add_row(escape(printable(f"{label}: {reason}")), f"{number:,}", "")
        for family in self.families_without_records:
            table.add_row(f"no record: of the held-out family {family}", "0", "")
        return table


def conclude(
    directory: Path,
    splits: dict[str, tuple[ShardEntry, ...]],
    sources: tuple[SourceEntry, ...],
    totals: Tally,
    split_rule: dict[str, Any],
    table: tuple[str, str] | None,
) -> Report:
    """Writes what a data set has beside its shards, and returns its report.

    `table` is the name and the SHA-256 of the table whose clusters its shards have, if any.
    """
    counts = Counts(
        totals.records,
        dict(totals.rejected),
        dict(totals.filtered),
        dict(totals.changed),
        dict(totals.noted),
    )
    clusters = table and write_clusters(directory, splits, table)
    manifest = Manifest(splits, sources, counts, split_rule, clusters)
    manifest.write(directory)
    report = Report.of(manifest)
    report.write(directory)
    write_rejected(directory, totals.listed)
    return report


def write_rejected(directory: Path, listed: Mapping[str, Sequence[tuple[str, str, int]]]) -> None:
    """Writes `rejected.tsv`: the first records of each reason, by identifier, file and line."""
    lines = ["\t".join(_COLUMNS)]
    for reason, records in sorted(listed.items()):
        lines += [f"{reason}\t{_one_field(i)}\t{_one_field(f)}\t{line}" for i, f, line in records]
    (directory / REJECTED).write_text(
        "\n".join(lines) + "\n", encoding="utf-8", errors="backslashreplace"
    )


def _one_field(text: str) -> str:
    return printable(" ".join(text.split()))


def read_rejected(directory: Path) -> dict[str, list[tuple[str, str, int]]]:
    """Reads `rejected.tsv`: the records of each reason, by identifier, file and line."""
    path = directory / REJECTED
    try:
        header, *rows = path.read_text(encoding="utf-8").splitlines()
        if header != "\t".join(_COLUMNS):
            raise ValueError(f"the columns are {header!r:.200}")
        listed: dict[str, list[tuple[str, str, int]]] = {}
        for row in rows:
            reason, identifier, file, line = row.split("\t")
            listed.setdefault(reason, []).append((identifier, file, int(line)))
    except (OSError, ValueError) as error:
        raise InputDataError(f"{path} is missing or damaged; prepare the data set again") from error
    return listed


def warn_of_rejects(before: Tally, latest: Tally, max_reject_rate: float) -> bool:
    """Warns, and returns true, if the fraction of rejected records exceeds the limit so far.

    The build continues, because later records may lower the fraction.
    """
    records = before.records + latest.records
    rejected = before.num_rejected + latest.num_rejected
    if records < _ENOUGH_RECORDS or rejected <= max_reject_rate * records:
        return False
    reason, number = (before.rejected + latest.rejected).most_common(1)[0]
    print(
        f"protlm: warning: {rejected:,} of the first {records:,} records cannot be used, most of "
        f"them ({number:,}) for this reason: {reason}; if more than {max_reject_rate:.2%} are "
        "rejected at the end, no data set is made: stop now with Ctrl-C, and resume by the same "
        "command with a higher --max-reject-rate",
        file=sys.stderr,
    )
    return True


def refuse_too_many_rejects(tally: Tally, max_reject_rate: float) -> None:
    """Refuses a data set with too many rejected records, or with no record left."""
    reasons = ", ".join(f"{n:,} {reason}" for reason, n in sorted(tally.rejected.items()))
    options: dict[str, object] = {"allow_gaps": True} if GAP in tally.rejected else {}
    if tally.num_filtered and tally.num_rejected + tally.num_filtered == tally.records:
        filtered = ", ".join(f"{n:,} {reason}" for reason, n in sorted(tally.filtered.items()))
        raise InputDataError(
            f"none of the {tally.records:,} records is left: {tally.num_filtered:,} were not "
            f"selected ({filtered}), {tally.num_rejected:,} cannot be used"
        )
    if tally.num_rejected == tally.records:
        raise InputDataError(
            f"none of the {tally.records:,} records can be used: {reasons}; the first of them "
            f"{_first(tally)}",
            options,
        )
    if tally.rejected.get(NUL, 0) > _MAX_NUL_RATE * tally.records:
        raise InputDataError(
            f"{tally.rejected[NUL]:,} of {tally.records:,} records contain NUL bytes: the file is "
            "damaged; download it again"
        )
    if tally.num_rejected > max_reject_rate * tally.records:
        # Rounded up to thousandths.
        enough = math.ceil(tally.num_rejected / tally.records * 1000) / 1000
        raise InputDataError(
            f"{tally.num_rejected:,} of {tally.records:,} records cannot be used ({reasons}), "
            f"more than {max_reject_rate:.2%}, the first of them {_first(tally)}: fix the file, or "
            "allow more",
            {"max_reject_rate": enough, **options},
        )


def _first(tally: Tally) -> str:
    return "; ".join(
        f"{identifier} ({file}, line {line}: {reason})"
        for reason, listed in sorted(tally.listed.items())
        for identifier, file, line in listed[:1]
    )
