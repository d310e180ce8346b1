"""The commands on data sets and stored models. Each imports the heavy modules that it needs."""

from pathlib import Path
from typing import Annotated

import typer

from protlm.cli.options import (
    OUTPUT,
    BreakLock,
    SlurmSettings,
    allowed_value,
    choice,
    new_output,
    option,
)
from protlm.system.errors import UserError

data_app = typer.Typer(help="Verify, describe, merge or export prepared data sets.")
checkpoint_app = typer.Typer(help="Describe, verify, import, export or convert a model.")

OodFamilies = Annotated[
    list[str] | None,
    option(
        "Families held out as test_ood_family, by words of any column of the table (PF00069 "
        "IPR000719 'Globin family'); default: the paper's 20 of Pfam."
    ),
]
ClusterTable = Annotated[
    Path | None,
    option(
        "cluster.tsv of MMseqs2. Clusters are stored for data.sampling=cluster, and each stays "
        "in one split; --split-table overrides this. Takes 40 bytes of memory for a row."
    ),
]


def prepare(
    sources: Annotated[
        list[Path], typer.Argument(help="Sequence files or folders; - reads standard input.")
    ],
    out: Annotated[Path, option("The folder of the new data set.", *OUTPUT)],
    split_table: Annotated[Path | None, option("TSV with the columns accession and split.")] = None,
    valid_fraction: Annotated[float, option("Fraction of the records for the split valid.")] = 0.01,
    test_fraction: Annotated[float, option("Fraction of the records for the split test.")] = 0.01,
    family_table: Annotated[
        Path | None, option("TSV with Entry and Pfam or other families, for --ood-families.")
    ] = None,
    ood_families: OodFamilies = None,
    cluster_table: ClusterTable = None,
    cluster: Annotated[
        bool, option("Cluster the sequences with MMseqs2 linclust.", "--cluster")
    ] = False,
    cluster_identity: Annotated[
        float | None, option("Minimum sequence identity of --cluster; default: 0.5.")
    ] = None,
    min_length: Annotated[int | None, option("Minimum number of residues.")] = None,
    max_length: Annotated[int | None, option("Maximum number of residues.")] = None,
    no_fragments: Annotated[bool, option("Exclude fragments.", "--no-fragments")] = False,
    organism: Annotated[
        list[str] | None, option("Keep this name or NCBI taxon; repeatable.")
    ] = None,
    deduplicate: Annotated[
        bool, option("Keep only the first of identical sequences.", "--deduplicate")
    ] = False,
    max_reject_rate: Annotated[float, option("Stop at a larger fraction of rejects.")] = 0.01,
    allow_nucleotides: Annotated[
        bool, option("Accept files that look like DNA or RNA.", "--allow-nucleotides")
    ] = False,
    allow_comments: Annotated[
        bool, option("Skip FASTA lines that begin with ; # or !.", "--allow-comments")
    ] = False,
    allow_gaps: Annotated[bool, option("Remove alignment gaps (- . ~).", "--allow-gaps")] = False,
    ignore_trailing_garbage: Annotated[
        bool, option("Accept other bytes after gzip data.", "--ignore-trailing-garbage")
    ] = False,
    workers: Annotated[int, option("Worker processes; the result does not depend on them.")] = 1,
    shard_residues: Annotated[int, option("Approximate residues per shard.")] = 256_000_000,
    restart: Annotated[bool, option("Start over instead of resuming.", "--restart")] = False,
    break_lock: BreakLock = False,
    executor: Annotated[str | None, option("Run one job per file: slurm, or local.")] = None,
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


@data_app.command("merge")
def data_merge(
    parts: Annotated[list[Path], typer.Argument(help="Data sets, in the order of the result.")],
    out: Annotated[Path, new_output("The folder of the new data set.")],
) -> None:
    """Merge data sets that were split by the same rule."""
    from protlm.data_prep import merge

    merge.merge(parts, out)


@data_app.command("verify")
def data_verify(directory: Path) -> None:
    """Verify every shard against the manifest."""
    from protlm.commands.data import verify

    verify(directory)


@data_app.command("info")
def data_info(directory: Path) -> None:
    """Print splits, lengths, sources, and counts of rejected and changed records."""
    from protlm.commands.data import info

    info(directory)


@data_app.command("export")
def data_export(
    directory: Path,
    output: Annotated[Path | None, new_output("x.fasta or x.fasta.gz; default: print.")] = None,
    split: Annotated[list[str] | None, option("A split; repeatable. Default: all.")] = None,
) -> None:
    """Write the sequences as FASTA."""
    from protlm.commands.data import export

    export(directory, output, split or ())


@data_app.command("leakage")
def data_leakage(
    directory: Path,
    min_shared: Annotated[
        float, option("Fraction of shared k-mers that makes two sequences neighbors.")
    ] = 0.5,
    json: Annotated[Path | None, option("Also write the counts as JSON.")] = None,
    mmseqs: Annotated[
        bool, option("Also search remote homologs with MMseqs2.", "--mmseqs")
    ] = False,
) -> None:
    """Count the sequences of each split that are similar to a training sequence."""
    from protlm.data_prep import leakage

    options = leakage.LeakageOptions(min_shared=min_shared, json=json, mmseqs=mmseqs)
    leakage.leakage(directory, options)


@checkpoint_app.command("info")
def checkpoint_info(path: Path) -> None:
    """Describe a run, a checkpoint or an exported model."""
    from protlm.commands.checkpoint import info

    info(path)


@checkpoint_app.command("verify")
def checkpoint_verify(path: Path) -> None:
    """Verify the SHA-256 of one checkpoint, or of all checkpoints of a run."""
    from protlm.commands.checkpoint import verify

    verify(path)


@checkpoint_app.command("export")
def checkpoint_export(
    path: Path,
    output: Annotated[Path, new_output("The folder to write; a file with --format onnx.")],
    dtype: Annotated[
        str | None, option("float32, or bfloat16, which is half as large; only of protlm's format.")
    ] = None,
    format: Annotated[
        str, option("protlm, hf for Hugging Face transformers, or onnx for ONNX runtimes.")
    ] = "protlm",
    fit: Annotated[
        Path | None, option("The NAME.fit.json of the contact head; only of an ESM with hf.")
    ] = None,
) -> None:
    """Export the weights and their description to a new folder, or the network to an ONNX file."""
    from protlm.commands.checkpoint import export, export_to_hugging_face, export_to_onnx

    allowed_value("--format", format, "hf", "onnx", "protlm")
    if format != "protlm" and dtype is not None:
        raise UserError(f"--dtype {dtype} needs --format protlm; --format {format} is float32")
    if format == "hf":
        export_to_hugging_face(path, output, fit)
    elif fit is not None:
        raise UserError("--fit needs --format hf")
    elif format == "onnx":
        export_to_onnx(path, output)
    else:
        kind = allowed_value("--dtype", dtype or "float32", "float32", "bfloat16")
        export(path, output, kind)


@checkpoint_app.command("import")
def checkpoint_import(
    source: Path,
    output: Annotated[Path, new_output("The folder to write.")],
    base: Annotated[Path | None, option("The model that an adapter of PEFT was made for.")] = None,
) -> None:
    """Convert a foreign model to model.safetensors and config.json; docs/interop.md lists them."""
    from protlm.commands.checkpoint import import_model

    import_model(source, output, base)


@checkpoint_app.command("convert")
def checkpoint_convert(
    model: Path,
    attention: Annotated[str, option("The new mechanism; docs/mechanisms.md.")],
    output: Annotated[Path, new_output("The folder to write.")],
    settings: Annotated[
        list[str] | None, option("OPTION=VALUE of the new mechanism.", "--set")
    ] = None,
    seed: Annotated[int | None, option("Seed of the new weights.")] = None,
) -> None:
    """Replace the attention of a model, and keep all other weights."""
    from protlm.commands.checkpoint import convert_model

    convert_model(model, output, attention=attention, settings=settings or [], seed=seed)
