"""From sequence files to a data set: read, select, split, encode, write; resumable at any time."""

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from protlm.data.records import Tally
from protlm.data.shards.data_set import verify
from protlm.data.shards.manifest import MANIFEST
from protlm.options.jobs import Submission
from protlm.options.prepare import PrepareOptions, SplitOptions
from protlm.system.errors import InputDataError, UserError
from protlm.system.interruption import sigterm_as_interrupt
from protlm.system.shares import in_order
from protlm.system.terminal import JobProgress, printable
from protlm.system.work_folder import refuse_finished

from .clusters import ClusterSplit, ClusterTable
from .duplicates import DigestSet
from .encode import Encoder
from .families import (
    PAPER_FAMILIES,
    FamilySplit,
    HeldOutFamilies,
    WithoutHomologs,
    refuse_empty_hold_out,
)
from .merge import merge_into
from .mmseqs import Clustering, cluster_sources, find_homologs
from .report import Report, conclude, refuse_too_many_rejects, warn_of_rejects
from .segments import OpenSegment
from .sources import (
    STANDARD_INPUT,
    Place,
    SourceReader,
    check_formats,
    find_sources,
    list_files,
    refuse_inside,
)
from .split import HashSplit, SplitRule, TableSplit
from .work_folder import DATA_SET, BuildFolder, Plan, build_folder


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
    settings = {**options.settings(), "--executor": submission and str(submission.executor)}
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
        closing(
            in_order(encoder, reader.blocks(), options.workers, work.path, "use fewer --workers")
        ) as encoded,
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
        prepare(
            [source],
            share,
            split_rule=encoder.split_rule,
            clusters=encoder.clusters,
            options=options,
        )
    # A share that an earlier start finished may be damaged since.
    for fault in verify(share):
        raise InputDataError(f"{fault}: start over", {"restart": True})


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


def prepare_files(
    sources: Sequence[Path],
    out: Path,
    split: SplitOptions,
    options: PrepareOptions,
    submission: Submission | None,
) -> None:
    """Prepares files, and folders of files, by the split rule of the options."""
    files = list_files(sources)
    if submission is not None:
        submission.check()
    rule, clusters = make_rule(split, files, out, options)
    prepare(files, out, split_rule=rule, clusters=clusters, options=options, submission=submission)


def make_rule(
    options: SplitOptions, sources: Sequence[Path], out: Path, building: PrepareOptions
) -> tuple[SplitRule, ClusterTable | None]:
    """Builds the split rule, and the clusters that the data set stores, if any.

    Reads the tables, and clusters the sources if requested.
    """
    rule: SplitRule = HashSplit(options.valid_fraction, options.test_fraction)
    # Tables and clusters may take hours, so an output that cannot be written is reported first.
    refuse_finished(out, DATA_SET)
    listed = options.split_table and TableSplit(options.split_table)
    families = _held_out(options)
    clusters = _clusters(options, sources, out, building)
    if clusters is not None:
        rule = ClusterSplit(clusters, rule, families)
    if families is not None:
        rule = FamilySplit(families, rule)
    rule = listed or rule
    if options.no_homologs:
        rule = WithoutHomologs(rule, *find_homologs(sources, out, rule, building))
    return rule, clusters


def _held_out(options: SplitOptions) -> HeldOutFamilies | None:
    if options.family_table is None:
        return None
    names = [name.strip() for name in ",".join(options.ood_families).split(",") if name.strip()]
    if options.ood_families and not names:
        raise UserError("--ood-families is empty; give words of the table: PF00069 IPR000719")
    families = HeldOutFamilies(options.family_table, names or PAPER_FAMILIES)
    columns = [f"{column} ({n:,} rows)" for column, n in families.rows_by_column.items()]
    taken = f"{families.table}: families are held out by the column {' and '.join(columns)}"
    print(printable(taken), file=sys.stderr)
    return families


def _clusters(
    options: SplitOptions, sources: Sequence[Path], out: Path, building: PrepareOptions
) -> ClusterTable | None:
    if options.cluster:
        clustering = Clustering(
            options.cluster_identity or Clustering.identity,
            options.cluster_coverage or Clustering.coverage,
            building.reading,
            building.break_lock,
        )
        return ClusterTable(*cluster_sources(sources, out, clustering))
    return None if options.cluster_table is None else ClusterTable(options.cluster_table)
