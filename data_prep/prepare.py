"""FASTA files to a data set: read, split, shard, report; complete or not there at all."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from data_prep.rejects import refuse_too_many_rejects
from data_prep.report import Report, SplitSummary
from data_prep.shard import ShardCutter
from data_prep.split import SplitRule
from protlm.data.manifest import Counts, Manifest, ShardEntry, SourceEntry
from protlm.data.records import Record, Tally
from protlm.data.records.fasta import read_fasta
from protlm.errors import InputDataError, UserError
from protlm.paths import check_output, complete_folder, existing_file, sha256_of
from protlm.progress import JobProgress

_REPORT_EVERY = 1 << 10


def prepare(
    sources: list[Path],
    out: Path,
    *,
    split_rule: SplitRule,
    shard_residues: int = 256_000_000,
    max_reject_rate: float = 0.01,
    allow_nucleotides: bool = False,
) -> Report:
    """Turns FASTA files into a data set of checked shards, and prints what became of the records.

    Args:
        sources: FASTA files, plain or gzip, taken in this order.
        out: the folder to make.
        split_rule: which split a record belongs to.
        shard_residues: residues of a shard, about.
        max_reject_rate: the share of records that may be left out, for whatever reason.
        allow_nucleotides: takes files that look like DNA or RNA.

    Raises:
        UserError: no source, or impossible settings.
        InputDataError: a source cannot be used, or too many of its records.
        OutputError: `out` exists or cannot be written.
    """
    if not sources:
        raise UserError("no source given; type: protlm prepare SOURCE.fasta.gz --out DIR")
    if not 0 <= max_reject_rate <= 1:
        raise UserError(f"max_reject_rate={max_reject_rate} must be between 0 and 1")
    check_output(out)
    for source in sources:
        existing_file(source, "a FASTA file")
    tally = Tally()
    with complete_folder(out) as directory:
        cutter = ShardCutter(directory, split_rule, shard_residues)
        entries: list[SourceEntry] = []
        records = _read_all(sources, tally, entries, allow_nucleotides=allow_nucleotides)
        cutter.write(_reported(records), tally)
        refuse_too_many_rejects(tally, max_reject_rate)
        report = _conclude(cutter, tuple(entries), tally)
        report.write(directory, tally)
    Console(stderr=True).print(report.table())
    return report


def _read_all(
    sources: list[Path], tally: Tally, entries: list[SourceEntry], *, allow_nucleotides: bool
) -> Iterator[Record]:
    """The records of all sources; `entries` grows by each source that was read."""
    for path in sources:
        before = path.stat()
        yield from read_fasta(path, tally, allow_nucleotides=allow_nucleotides)
        entries.append(SourceEntry(path.name, before.st_size, sha256_of(path)))
        after = path.stat()
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise InputDataError(f"{path} changed while it was read; wait until it is complete")


def _reported(records: Iterator[Record]) -> Iterator[Record]:
    """Passes records on and reports how many."""
    with JobProgress("records", None) as progress:
        count = 0
        for count, record in enumerate(records, start=1):
            if count % _REPORT_EVERY == 0:
                progress.update(count)
            yield record
        progress.update(count)


def _conclude(cutter: ShardCutter, sources: tuple[SourceEntry, ...], tally: Tally) -> Report:
    """Writes the last shards and, when they are all there, the manifest."""
    splits = cutter.finish()
    counts = Counts(tally.records, dict(tally.rejected), dict(tally.changed), dict(tally.noted))
    rule = cutter.split_rule.describe()
    Manifest(splits, sources, counts, rule).write(cutter.directory)
    summaries = {split: _summary(shards) for split, shards in splits.items()}
    return Report(sources, rule, summaries, counts, cutter.num_duplicates())


def _summary(shards: tuple[ShardEntry, ...]) -> SplitSummary:
    return SplitSummary(
        sequences=sum(shard.sequences for shard in shards),
        residues=sum(shard.residues for shard in shards),
        shards=len(shards),
    )
