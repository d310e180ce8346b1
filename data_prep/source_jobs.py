"""Preparation by one job per source, and the merging of their parts."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from protlm.data.shards.manifest import MANIFEST
from protlm.system.errors import UserError
from protlm.system.interruption import sigterm_as_interrupt
from protlm.system.shares import Submission
from protlm.system.work_folder import refuse_finished

from .clusters import ClusterTable
from .families import refuse_empty_hold_out
from .merge import merge_into
from .prepare import PrepareOptions, prepare, table_of
from .report import Report
from .sources import STANDARD_INPUT, check_formats, find_sources, refuse_inside
from .split import SplitRule
from .work_folder import DATA_SET, Plan, build_folder


def prepare_by_jobs(
    sources: Sequence[Path],
    out: Path,
    *,
    split_rule: SplitRule,
    clusters: ClusterTable | None = None,
    options: PrepareOptions,
    submission: Submission,
) -> Report:
    """Prepares each source in a separate job, waits for all of them, and merges their parts.

    The same call resumes an interrupted build, including its unfinished jobs.

    Args:
        sources: the files.
        out: the folder to make.
        split_rule: assigns records to splits.
        clusters: assigns records to clusters, if the data set is to store them.
        options: as for `prepare`.
        submission: options for submitting jobs.
    """
    refuse_finished(out, DATA_SET)
    refuse_inside(sources, out)
    if options.deduplicate or STANDARD_INPUT in sources:
        what = "--deduplicate" if options.deduplicate else "standard input"
        raise UserError(f"--executor runs one job per file, which excludes {what}")
    settings = {**options.settings(), "--executor": submission.executor.value}
    plan = Plan(find_sources(sources), settings, split_rule.describe(), table_of(clusters))
    with (
        sigterm_as_interrupt(),
        build_folder(out, plan, restart=options.restart, break_lock=options.break_lock) as work,
    ):
        check_formats(plan.sources, options.reading)
        work.parts.mkdir(exist_ok=True)
        if clusters is not None:
            clusters.store(work.clusters)
        parts = [work.parts / f"{number:05d}" for number in range(len(plan.sources))]
        pairs = [
            (source.path.absolute(), part.absolute())
            for source, part in zip(plan.sources, parts, strict=True)
        ]
        make = partial(
            _make_part, split_rule, clusters, replace(options, restart=False, is_part=True)
        )
        submission.run(make, pairs, work.path / "jobs", options.workers)
        report = merge_into(work.data, parts)
        refuse_empty_hold_out(report.split_rule, report.counts.noted)
    report.print()
    return report


def _make_part(
    rule: SplitRule, clusters: ClusterTable | None, options: PrepareOptions, pair: tuple[Path, Path]
) -> None:
    """Prepares a source as a part, unless the part exists already."""
    source, part = pair
    if not (part / MANIFEST).is_file():
        prepare([source], part, split_rule=rule, clusters=clusters, options=options)
