"""The command that prepares data sets. It imports the heavy modules that it needs."""

from pathlib import Path
from typing import Annotated

import typer

from protlm.cli.options import (
    BreakLock,
    SlurmSettings,
    choice,
)


def prepare(
    sources: Annotated[
        list[Path], typer.Argument(help="Sequence files or folders; - reads standard input.")
    ],
    out: Annotated[Path, typer.Option(help="The folder of the new data set.")],
    split_table: Annotated[
        Path | None, typer.Option(help="TSV with the columns accession and split.")
    ] = None,
    valid_fraction: Annotated[
        float, typer.Option(help="Fraction of the records for the split valid.")
    ] = 0.01,
    test_fraction: Annotated[
        float, typer.Option(help="Fraction of the records for the split test.")
    ] = 0.01,
    family_table: Annotated[
        Path | None, typer.Option(help="TSV with the columns Entry and Pfam, for --ood-families.")
    ] = None,
    ood_families: Annotated[
        list[str] | None,
        typer.Option(
            help="Pfam accessions held out as test_ood_family (PF00069 ...); default: the "
            "paper's 20."
        ),
    ] = None,
    cluster_table: Annotated[
        Path | None,
        typer.Option(
            help="cluster.tsv of MMseqs2. Clusters are stored for data.sampling=cluster, and each "
            "stays in one split; --split-table overrides this. Takes 40 bytes of memory for a row."
        ),
    ] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Cluster the sequences with MMseqs2 linclust.")
    ] = False,
    cluster_identity: Annotated[
        float | None, typer.Option(help="Minimum sequence identity of --cluster; default: 0.5.")
    ] = None,
    min_length: Annotated[int | None, typer.Option(help="Minimum number of residues.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Maximum number of residues.")] = None,
    no_fragments: Annotated[
        bool,
        typer.Option("--no-fragments", help="Exclude records that UniProt marks as fragments."),
    ] = False,
    organism: Annotated[
        list[str] | None,
        typer.Option(help="Keep only this name or NCBI taxon; repeatable."),
    ] = None,
    deduplicate: Annotated[
        bool, typer.Option("--deduplicate", help="Keep only the first of identical sequences.")
    ] = False,
    max_reject_rate: Annotated[
        float, typer.Option(help="Stop when more than this fraction of the records is rejected.")
    ] = 0.01,
    allow_nucleotides: Annotated[
        bool, typer.Option("--allow-nucleotides", help="Accept files that look like DNA or RNA.")
    ] = False,
    allow_comments: Annotated[
        bool, typer.Option("--allow-comments", help="Skip FASTA lines that begin with ; # or !.")
    ] = False,
    allow_gaps: Annotated[
        bool, typer.Option("--allow-gaps", help="Remove alignment gaps (- . ~).")
    ] = False,
    ignore_trailing_garbage: Annotated[
        bool, typer.Option("--ignore-trailing-garbage", help="Accept other bytes after gzip data.")
    ] = False,
    workers: Annotated[
        int, typer.Option(help="Worker processes; the result does not depend on them.")
    ] = 1,
    shard_residues: Annotated[
        int, typer.Option(help="Approximate residues per shard, over all splits.")
    ] = 256_000_000,
    restart: Annotated[
        bool, typer.Option("--restart", help="Start over instead of resuming a killed build.")
    ] = False,
    break_lock: BreakLock = False,
    executor: Annotated[
        str | None, typer.Option(help="Run one job per file: slurm, or local (processes).")
    ] = None,
    slurm: SlurmSettings = None,
) -> None:
    """Convert FASTA, .dat or XML files to HDF5 shards; resumable."""
    from protlm.data.records import ReadOptions
    from protlm.data_prep import encode
    from protlm.data_prep import prepare as building
    from protlm.data_prep import sources as files_of
    from protlm.system.shares import Executor, Submission

    split = building.SplitOptions(
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
    rule, clusters = building.make_rule(split, files, out, options)
    building.prepare(
        files, out, split_rule=rule, clusters=clusters, options=options, submission=submission
    )
