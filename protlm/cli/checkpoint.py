"""The command line of `protlm checkpoint`. Each command imports the heavy modules that it needs."""

from pathlib import Path
from typing import Annotated

import typer

from protlm.system.errors import UserError

checkpoint_app = typer.Typer(help="Describe, verify, import, export or convert a model.")


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
        typer.Option(help="float32, or bfloat16, which is half as large; only of protlm's format."),
    ] = None,
    format: Annotated[str, typer.Option(help="protlm, or hf for Hugging Face transformers.")] = (
        "protlm"
    ),
    fit: Annotated[
        Path | None,
        typer.Option(help="The NAME.fit.json of the contact head; only of an ESM with hf."),
    ] = None,
) -> None:
    """Export the weights and their description to a new folder."""
    from protlm.commands.checkpoint import export, export_to_hugging_face

    if format == "hf" and dtype is None:
        export_to_hugging_face(path, output, fit)
    elif format == "protlm" and fit is None:
        export(path, output, dtype or "float32")
    else:
        raise _impossible_export(format, dtype)


def _impossible_export(format: str, dtype: str | None) -> UserError:
    if format == "protlm":
        return UserError("--fit needs --format hf")
    if format == "hf":
        return UserError(f"--dtype {dtype} needs --format protlm; --format hf is float32")
    return UserError(f"--format {format} is not one of hf, protlm")


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
    attention: Annotated[str, typer.Option(help="The new mechanism; docs/mechanisms.md.")],
    output: Annotated[Path, typer.Option("--output", "-o")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="OPTION=VALUE of the new mechanism.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the new weights.")] = None,
) -> None:
    """Replace the attention of a model, and keep all other weights."""
    from protlm.commands.checkpoint import convert_model

    convert_model(model, output, attention=attention, settings=settings or [], seed=seed)
