"""Sequence files to a data set: read, select, split, encode, write; killed at any moment, go on."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from data_prep.encode import Encoder
from data_prep.families import refuse_empty_hold_out
from data_prep.interruption import sigterm_as_interrupt
from data_prep.rejects import refuse_too_many_rejects, warn_of_rejects
from data_prep.report import Report, write_rejected
from data_prep.segments import OpenSegment, known_before
from data_prep.select import Selection
from data_prep.sources import Place, SourceReader, find_sources, recognise, refuse_inside
from data_prep.split import SplitRule
from data_prep.work_folder import Plan, WorkFolder, refuse_finished, work_folder
from data_prep.workers import in_order
from protlm.console import console
from protlm.data.manifest import Counts, Manifest, ShardEntry
from protlm.data.records import ReadOptions, Tally
from protlm.errors import UserError
from protlm.progress import JobProgress

_MAX_WORKERS = 256


@dataclass(frozen=True)
class PrepareOptions:
    """How a data set is made, besides its splits.

    Args:
        workers: processes that parse and encode; the result does not depend on it.
        selection: which records are wanted.
        deduplicate: leaves out sequences that came before, letter by letter.
        max_reject_rate: the share of records that may be unusable, for whatever reason.
        shard_residues: a segment, whose splits get a shard each, has so many residues at least,
            unless its sequences are very short.
        reading: what is taken besides what is right.
        restart: begins anew where something was begun.
        break_lock: takes over what a process of another machine was building.
        is_part: other parts will be merged with it, so what is not in it may be in those.

    Raises:
        UserError: impossible settings.
    """

    workers: int = 1
    selection: Selection = field(default_factory=Selection)
    deduplicate: bool = False
    max_reject_rate: float = 0.01
    shard_residues: int = 256_000_000
    reading: ReadOptions = field(default_factory=ReadOptions)
    restart: bool = False
    break_lock: bool = False
    is_part: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= _MAX_WORKERS:
            raise UserError(f"--workers {self.workers} must be between 1 and {_MAX_WORKERS}")
        if not 0 <= self.max_reject_rate <= 1:
            raise UserError(f"--max-reject-rate {self.max_reject_rate} must be between 0 and 1")
        if self.shard_residues < 1:
            raise UserError(f"--shard-residues {self.shard_residues} must be at least 1")

    def settings(self) -> dict[str, Any]:
        """What the result depends on, by the flags that ask for it."""
        return {
            "--shard-residues": self.shard_residues,
            "--deduplicate": self.deduplicate,
            "--allow-nucleotides": self.reading.allow_nucleotides,
            "--allow-comments": self.reading.allow_comments,
            "--allow-gaps": self.reading.allow_gaps,
            "--ignore-trailing-garbage": self.reading.ignore_trailing_garbage,
            **self.selection.describe(),
        }


def prepare(
    sources: Sequence[Path],
    out: Path,
    *,
    split_rule: SplitRule,
    options: PrepareOptions | None = None,
) -> Report:
    """Turns sequence files into a data set of checked shards, and prints what became of them.

    Killed, it is continued by the same call. The bytes of the data set depend on the sources, the
    split rule and the settings alone.

    Args:
        sources: files or folders of FASTA, Swiss-Prot flat files or UniProt XML, plain or gzip,
            taken in this order; `-` is standard input.
        out: the folder to make.
        split_rule: which split a record belongs to.
        options: everything else.

    Raises:
        UserError: no source, or something else was begun there.
        InputDataError: a source cannot be used or changes, or too many of its records.
        OutputError: `out` exists, is being built by another process, or cannot be written.
        WorkerDiedError: a worker process was killed.
    """
    options = options or PrepareOptions()
    refuse_finished(out)
    refuse_inside(sources, out)
    settings = {**options.settings(), "--executor": None}
    plan = Plan(find_sources(sources), settings, split_rule.describe())
    with (
        sigterm_as_interrupt(),
        work_folder(out, plan, restart=options.restart, break_lock=options.break_lock) as work,
    ):
        if not work.journal.segments:
            recognise(plan.sources, options.reading)
        _build(work, plan, Encoder(options.selection, split_rule), options)
        report = _conclude(work, plan)
        if not options.is_part:
            refuse_empty_hold_out(report.split_rule, report.counts.noted)
    console(stderr=True).print(report.table())
    return report


def _build(work: WorkFolder, plan: Plan, encoder: Encoder, options: PrepareOptions) -> None:
    """Writes all segments that are not there yet."""
    segments = work.journal.segments
    start = segments[-1].end if segments else Place()
    entries = [entry for segment in segments for entry in segment.sources]
    end = Place(len(plan.sources))
    if start == end:
        return
    reading = replace(options.reading, origins=options.selection.needs_origins)
    reader = SourceReader(plan.sources, reading, start, entries)
    known, totals, is_warned = known_before(work), _totals(work), False
    segment = OpenSegment(known, deduplicate=options.deduplicate)
    with JobProgress("records", None, done=totals.records) as progress:
        for place, block in in_order(encoder, reader.blocks(), options.workers):
            segment.add(block)
            progress.update(totals.records + segment.tally.records)
            is_warned = is_warned or warn_of_rejects(totals, segment.tally, options.max_reject_rate)
            if segment.is_full(options.shard_residues):
                segment.write(work, place, reader.entries)
                totals.add(segment.tally)
                segment = OpenSegment(known, deduplicate=options.deduplicate)
    totals.add(segment.tally)
    refuse_too_many_rejects(totals, options.max_reject_rate)
    segment.write(work, end, reader.entries)


def _totals(work: WorkFolder) -> Tally:
    """What became of the records of all finished segments."""
    totals = Tally()
    for segment in work.journal.segments:
        totals.add(segment.tally)
    return totals


def _conclude(work: WorkFolder, plan: Plan) -> Report:
    """Writes the manifest and the report of a data set whose shards are all there."""
    segments, totals = work.journal.segments, _totals(work)
    splits: dict[str, tuple[ShardEntry, ...]] = {}
    for split in sorted({split for segment in segments for split in segment.shards}):
        splits[split] = tuple(s.shards[split] for s in segments if split in s.shards)
    sources = tuple(entry for segment in segments for entry in segment.sources)
    counts = Counts(
        totals.records,
        dict(totals.rejected),
        dict(totals.filtered),
        dict(totals.changed),
        dict(totals.noted),
    )
    manifest = Manifest(splits, sources, counts, plan.split_rule)
    manifest.write(work.data)
    report = Report.of(manifest)
    report.write(work.data)
    write_rejected(work.data, totals.listed)
    return report
