"""The command that prepares data sets. It imports the heavy modules that it needs."""

from pathlib import Path
from typing import Annotated

import typer

from protlm.cli.options import (
    AllowComments,
    AllowGaps,
    AllowNucleotides,
    BreakLock,
    Cluster,
    ClusterIdentity,
    ClusterTable,
    Deduplicate,
    FamilyTable,
    IgnoreTrailingGarbage,
    JobExecutor,
    MaxRejectRate,
    NoFragments,
    OodFamilies,
    Organism,
    Restart,
    ShardResidues,
    SlurmSettings,
    SplitTable,
    Workers,
)
from protlm.cli.values import choice


def prepare(
    sources: Annotated[
        list[Path], typer.Argument(help="Sequence files or folders; - reads standard input.")
    ],
    out: Annotated[Path, typer.Option(help="The folder of the new data set.")],
    split_table: SplitTable = None,
    valid_fraction: Annotated[
        float, typer.Option(help="Fraction of the records for the split valid.")
    ] = 0.01,
    test_fraction: Annotated[
        float, typer.Option(help="Fraction of the records for the split test.")
    ] = 0.01,
    family_table: FamilyTable = None,
    ood_families: OodFamilies = None,
    cluster_table: ClusterTable = None,
    cluster: Cluster = False,
    cluster_identity: ClusterIdentity = None,
    min_length: Annotated[int | None, typer.Option(help="Minimum number of residues.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Maximum number of residues.")] = None,
    no_fragments: NoFragments = False,
    organism: Organism = None,
    deduplicate: Deduplicate = False,
    max_reject_rate: MaxRejectRate = 0.01,
    allow_nucleotides: AllowNucleotides = False,
    allow_comments: AllowComments = False,
    allow_gaps: AllowGaps = False,
    ignore_trailing_garbage: IgnoreTrailingGarbage = False,
    workers: Workers = 1,
    shard_residues: ShardResidues = 256_000_000,
    restart: Restart = False,
    break_lock: BreakLock = False,
    executor: JobExecutor = None,
    slurm: SlurmSettings = None,
) -> None:
    """Convert FASTA, .dat or XML files to HDF5 shards; resumable."""
    from protlm.data.records import ReadOptions
    from protlm.data_prep import encode, rules
    from protlm.data_prep import prepare as building
    from protlm.data_prep import sources as files_of
    from protlm.system.shares import Executor, Submission

    split = rules.SplitOptions(
        valid_fraction=valid_fraction,
        test_fraction=test_fraction,
        split_table=split_table,
        ood_families=tuple(ood_families or ()),
        family_table=family_table,
        cluster_table=cluster_table,
        cluster=cluster,
        cluster_identity=cluster_identity,
    )
    options = building.PrepareOptions(
        workers=workers,
        selection=encode.Selection(min_length, max_length, no_fragments, tuple(organism or ())),
        deduplicate=deduplicate,
        max_reject_rate=max_reject_rate,
        shard_residues=shard_residues,
        reading=ReadOptions(allow_nucleotides, allow_comments, allow_gaps, ignore_trailing_garbage),
        restart=restart,
        break_lock=break_lock,
    )
    runner = None if executor is None else choice("--executor", executor, Executor)
    submission = Submission.parse(runner, slurm)
    files = files_of.list_files(sources)
    rule, clusters = rules.make_rule(split, files, out, options)
    building.prepare(
        files, out, split_rule=rule, clusters=clusters, options=options, submission=submission
    )
