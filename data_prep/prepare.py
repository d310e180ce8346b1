"""From sequence files to a data set: read, select, split, encode, write; resumable at any time."""

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from protlm.data.records import ReadOptions, Tally
from protlm.data.shards.data_set import verify
from protlm.data.shards.manifest import MANIFEST
from protlm.system.errors import InputDataError, UserError
from protlm.system.interruption import sigterm_as_interrupt
from protlm.system.shares import Submission, in_order
from protlm.system.terminal import JobProgress, printable
from protlm.system.work_folder import refuse_finished

from .clusters import ClusterSplit, ClusterTable
from .duplicates import DigestSet
from .encode import Encoder, Selection
from .families import PAPER_FAMILIES, FamilySplit, HeldOutFamilies, refuse_empty_hold_out
from .merge import merge_into
from .mmseqs import Clustering, cluster_sources
from .report import Report, conclude, refuse_too_many_rejects, warn_of_rejects
from .segments import OpenSegment
from .sources import STANDARD_INPUT, Place, SourceReader, check_formats, find_sources, refuse_inside
from .split import HashSplit, SplitRule, TableSplit
from .work_folder import DATA_SET, BuildFolder, Plan, build_folder


@dataclass(frozen=True)
class PrepareOptions:
    """Options of a build, except those of its splits.

    Args:
        workers: number of processes that parse and encode; it does not change the result.
        deduplicate: keeps only the first of identical sequences.
        shard_residues: minimum number of residues of a segment, which becomes one shard in each
            split, unless its sequences are very short.
        is_share: the data set will be merged with others, so it may lack held-out families, and no
            report is printed.
    """

    workers: int = 1
    selection: Selection = field(default_factory=Selection)
    deduplicate: bool = False
    max_reject_rate: float = 0.01
    shard_residues: int = 256_000_000
    reading: ReadOptions = field(default_factory=ReadOptions)
    restart: bool = False
    break_lock: bool = False
    is_share: bool = False

    def settings(self) -> dict[str, Any]:
        """Returns the settings that the result depends on, by flag."""
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
    clusters: ClusterTable | None = None,
    options: PrepareOptions | None = None,
    submission: Submission | None = None,
) -> Report:
    """Converts sequence files to a data set of verified shards, and prints a report.

    The same call resumes a killed build, and its unfinished jobs. The bytes of the data set depend
    only on the sources, the split rule, the clusters and the settings.

    Args:
        sources: files or folders of FASTA, Swiss-Prot flat files or UniProt XML, plain or gzip,
            read in this order; `-` is standard input.
        clusters: assigns records to clusters, if the data set is to store them.
        submission: prepares each source in a job of its own, and merges the shares.
    """
    options = options or PrepareOptions()
    refuse_finished(out, DATA_SET)
    refuse_inside(sources, out)
    if submission and (options.deduplicate or STANDARD_INPUT in sources):
        what = "--deduplicate" if options.deduplicate else "standard input"
        raise UserError(f"--executor runs one job per file, which excludes {what}")
    settings = {**options.settings(), "--executor": submission and submission.executor.value}
    table = None if clusters is None else (clusters.path.name, clusters.sha256)
    plan = Plan(find_sources(sources), settings, split_rule.describe(), table)
    encoder = Encoder(options.selection, split_rule, clusters)
    with (
        sigterm_as_interrupt(),
        build_folder(out, plan, restart=options.restart, break_lock=options.break_lock) as work,
    ):
        if not work.journal.segments:
            check_formats(plan.sources, options.reading)
        if submission is not None:
            report = _build_by_jobs(work, plan, encoder, options, submission)
        else:
            _build(work, plan, encoder, options)
            report = _conclude(work, plan)
        if not options.is_share:
            refuse_empty_hold_out(report.split_rule, report.counts.noted)
    if not options.is_share:
        report.print()
    return report


def _build(work: BuildFolder, plan: Plan, encoder: Encoder, options: PrepareOptions) -> None:
    segments = work.journal.segments
    start = segments[-1].end if segments else Place()
    entries = [entry for segment in segments for entry in segment.sources]
    end = Place(len(plan.sources))
    if start == end:
        return
    origins = options.selection.no_fragments or bool(options.selection.organisms)
    reader = SourceReader(plan.sources, replace(options.reading, origins=origins), start, entries)
    known = None
    if options.deduplicate:
        known = DigestSet(work.path / "digests.table")
        for number in range(len(segments)):
            known.add(work.read_first_seen(number))
    segment, totals, is_warned = OpenSegment(known), _totals(work), False
    with (
        JobProgress("records", None, done=totals.records, quiet=options.is_share) as progress,
        closing(in_order(encoder, reader.blocks(), options.workers, work.path)) as encoded,
    ):
        for place, block in encoded:
            segment.add(block)
            progress.update(totals.records + segment.tally.records)
            is_warned = is_warned or warn_of_rejects(totals, segment.tally, options.max_reject_rate)
            if segment.is_full(options.shard_residues):
                segment.write(work, place, reader.entries)
                totals.add(segment.tally)
                segment = OpenSegment(known)
    totals.add(segment.tally)
    refuse_too_many_rejects(totals, options.max_reject_rate)
    segment.write(work, end, reader.entries)


def _build_by_jobs(
    work: BuildFolder, plan: Plan, encoder: Encoder, options: PrepareOptions, submission: Submission
) -> Report:
    """Prepares each source in a job, unless its share exists already, and merges the shares."""
    shares = work.path / "parts"
    shares.mkdir(exist_ok=True)
    if encoder.clusters is not None:
        encoder.clusters.store(work.path / "clusters.sorted")
    pairs = [
        (source.path.absolute(), (shares / f"{number:05d}").absolute())
        for number, source in enumerate(plan.sources)
    ]
    make = partial(_make_share, encoder, replace(options, restart=False, is_share=True))
    submission.run(make, pairs, work.path / "jobs", options.workers)
    return merge_into(work.data, [share for _, share in pairs])


def _make_share(encoder: Encoder, options: PrepareOptions, pair: tuple[Path, Path]) -> None:
    source, share = pair
    if not (share / MANIFEST).is_file():
        rule, clusters = encoder.split_rule, encoder.clusters
        prepare([source], share, split_rule=rule, clusters=clusters, options=options)
    # A share that an earlier start finished may be damaged since.
    for fault in verify(share):
        raise InputDataError(f"{fault}; type the same command with --restart")


def _totals(work: BuildFolder) -> Tally:
    totals = Tally()
    for segment in work.journal.segments:
        totals.add(segment.tally)
    return totals


def _conclude(work: BuildFolder, plan: Plan) -> Report:
    segments, totals = work.journal.segments, _totals(work)
    names = sorted({name for segment in segments for name in segment.shards})
    splits = {name: tuple(s.shards[name] for s in segments if name in s.shards) for name in names}
    sources = tuple(entry for segment in segments for entry in segment.sources)
    return conclude(work.data, splits, sources, totals, plan.split_rule, plan.clusters)


@dataclass(frozen=True)
class SplitOptions:
    """Options of the split rule; the default is a random split.

    Args:
        split_table: table of the split of each accession; excludes all options except clusters.
        ood_families: words of the family table, separate or joined by commas; if empty, the Pfam
            families of the Performer paper.
        cluster_table: the `cluster.tsv` of MMseqs2; determines the clusters, and without a split
            table also the splits.
        cluster: creates such a table with MMseqs2.
    """

    valid_fraction: float = 0.01
    test_fraction: float = 0.01
    split_table: Path | None = None
    ood_families: tuple[str, ...] = ()
    family_table: Path | None = None
    cluster_table: Path | None = None
    cluster: bool = False
    cluster_identity: float | None = None


def make_rule(
    options: SplitOptions, sources: Sequence[Path], out: Path, building: PrepareOptions
) -> tuple[SplitRule, ClusterTable | None]:
    """Builds the split rule, and the clusters that the data set stores, if any.

    Reads the tables, and clusters the sources if requested.
    """
    _check(options)
    fractions = HashSplit(options.valid_fraction, options.test_fraction)
    # Tables and clusters may take hours, so an output that cannot be written is reported first.
    refuse_finished(out, DATA_SET)
    if options.split_table is not None:
        return TableSplit(options.split_table), _clusters(options, sources, out, building)
    families = None
    if options.family_table is not None:
        typed = [name.strip() for given in options.ood_families for name in given.split(",")]
        names = [name for name in typed if name]
        if options.ood_families and not names:
            raise UserError("--ood-families is empty; give words of the table: PF00069 IPR000719")
        families = HeldOutFamilies(options.family_table, names or PAPER_FAMILIES)
        found = [f"{column} ({n:,} rows)" for column, n in families.rows_by_column.items()]
        taken = f"{families.table}: families are held out by the column {' and '.join(found)}"
        print(printable(taken), file=sys.stderr)
    clusters = _clusters(options, sources, out, building)
    rule = fractions if clusters is None else ClusterSplit(clusters, fractions, families)
    return rule if families is None else FamilySplit(families, rule), clusters


def _clusters(
    options: SplitOptions, sources: Sequence[Path], out: Path, building: PrepareOptions
) -> ClusterTable | None:
    path = options.cluster_table
    if options.cluster:
        clustering = Clustering(
            Clustering.identity if options.cluster_identity is None else options.cluster_identity,
            building.reading,
            building.break_lock,
        )
        path = cluster_sources(sources, out, clustering)
    return None if path is None else ClusterTable(path)


def _check(options: SplitOptions) -> None:
    others = {
        "--valid-fraction": options.valid_fraction != SplitOptions.valid_fraction,
        "--test-fraction": options.test_fraction != SplitOptions.test_fraction,
        "--family-table": options.family_table is not None,
    }
    given = [flag for flag, is_given in others.items() if is_given]
    if options.split_table is not None and given:
        raise UserError(
            f"--split-table determines the split of every record and excludes {given[0]}: give one"
        )
    if options.cluster_table is not None and options.cluster:
        raise UserError("--cluster creates a cluster table and excludes --cluster-table: give one")
    if options.cluster_identity is not None and not options.cluster:
        raise UserError("--cluster-identity requires --cluster, which is not given")
    if options.ood_families and options.family_table is None:
        raise UserError(
            "--ood-families requires --family-table TABLE, which lists the families of accessions: "
            "at uniprot.org choose Download, TSV, and the columns Entry and Pfam"
        )
