"""What became of every record: the report of a preparation, as files and as a table."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from protlm.data.manifest import Counts, SourceEntry
from protlm.data.records import Tally
from protlm.data.shards import REJECTED, REPORT


@dataclass(frozen=True)
class SplitSummary:
    """The size of a split."""

    sequences: int
    residues: int
    shards: int


@dataclass(frozen=True)
class Report:
    """What a preparation read, kept and left out.

    `duplicate_sequences` counts kept sequences that came before, letter by letter.
    """

    sources: tuple[SourceEntry, ...]
    split_rule: dict[str, Any]
    splits: dict[str, SplitSummary]
    counts: Counts
    duplicate_sequences: int

    def write(self, directory: Path, tally: Tally) -> None:
        """Writes `report.json`, and `rejected.tsv` with the first 1,000 records per reason."""
        text = json.dumps(asdict(self), indent=1, sort_keys=True, ensure_ascii=False)
        (directory / REPORT).write_text(text + "\n", encoding="utf-8")
        lines = ["reason\tidentifier\tline"]
        for reason, records in sorted(tally.listed.items()):
            lines += [f"{reason}\t{identifier}\t{line}" for identifier, line in records]
        (directory / REJECTED).write_text("\n".join(lines) + "\n", encoding="utf-8")

    def table(self) -> Table:
        """The report for a terminal."""
        table = Table("", "records", "residues", box=None)
        table.columns[1].justify = table.columns[2].justify = "right"
        table.add_row("read", f"{self.counts.records:,}", "")
        for name, split in sorted(self.splits.items()):
            table.add_row(f"split {name}", f"{split.sequences:,}", f"{split.residues:,}")
        for label, counts in self.counts.by_kind().items():
            for reason, number in sorted(counts.items()):
                table.add_row(escape(f"{label}: {reason}"), f"{number:,}", "")
        table.add_row("duplicate sequences, kept", f"{self.duplicate_sequences:,}", "")
        return table
