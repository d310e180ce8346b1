"""The command lines of `protlm data` and `protlm checkpoint`, which have commands of their own."""

from pathlib import Path
from typing import Annotated

import typer

from protlm.cli.options import allowed_value, option
from protlm.system.errors import UserError

data_app = typer.Typer(help="Verify, describe, merge or export prepared data sets.")
checkpoint_app = typer.Typer(help="Describe, verify, import, export or convert a model.")


@data_app.command("merge")
def data_merge(
    parts: Annotated[list[Path], typer.Argument(help="Data sets, in the order of the result.")],
    out: Annotated[Path, option("The folder of the new data set.")],
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
    output: Annotated[
        Path | None,
        option("x.fasta or x.fasta.gz; default: print.", "--output", "-o"),
    ] = None,
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
    output: Annotated[Path, typer.Option("--output", "-o")],
    dtype: Annotated[
        str | None,
        option("float32, or bfloat16, which is half as large; only of protlm's format."),
    ] = None,
    format: Annotated[str, option("protlm, or hf for Hugging Face transformers.")] = ("protlm"),
    fit: Annotated[
        Path | None,
        option("The NAME.fit.json of the contact head; only of an ESM with hf."),
    ] = None,
) -> None:
    """Export the weights and their description to a new folder."""
    from protlm.commands.checkpoint import export, export_to_hugging_face

    allowed_value("--format", format, "hf", "protlm")
    if format == "hf" and dtype is not None:
        raise UserError(f"--dtype {dtype} needs --format protlm; --format hf is float32")
    if format == "hf":
        export_to_hugging_face(path, output, fit)
    elif fit is not None:
        raise UserError("--fit needs --format hf")
    else:
        export(path, output, dtype or "float32")


@checkpoint_app.command("import")
def checkpoint_import(
    source: Path, output: Annotated[Path, typer.Option("--output", "-o")]
) -> None:
    """Convert a foreign model to model.safetensors and config.json; docs/interop.md lists them."""
    from protlm.commands.checkpoint import import_model

    import_model(source, output)


@checkpoint_app.command("convert")
def checkpoint_convert(
    model: Path,
    attention: Annotated[str, option("The new mechanism; docs/mechanisms.md.")],
    output: Annotated[Path, typer.Option("--output", "-o")],
    settings: Annotated[
        list[str] | None, option("OPTION=VALUE of the new mechanism.", "--set")
    ] = None,
    seed: Annotated[int | None, option("Seed of the new weights.")] = None,
) -> None:
    """Replace the attention of a model, and keep all other weights."""
    from protlm.commands.checkpoint import convert_model

    convert_model(model, output, attention=attention, settings=settings or [], seed=seed)
