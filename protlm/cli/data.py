"""The command line of `protlm data`. Each command imports the heavy modules that it needs."""

from pathlib import Path
from typing import Annotated

import typer

data_app = typer.Typer(help="Verify, describe, merge or export prepared data sets.")


@data_app.command("merge")
def data_merge(
    parts: Annotated[list[Path], typer.Argument(help="Data sets, in the order of the result.")],
    out: Annotated[Path, typer.Option(help="The folder of the new data set.")],
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
        typer.Option("--output", "-o", help="x.fasta or x.fasta.gz; default: print."),
    ] = None,
    split: Annotated[
        list[str] | None, typer.Option(help="A split; repeatable. Default: all.")
    ] = None,
) -> None:
    """Write the sequences as FASTA."""
    from protlm.commands.data import export

    export(directory, output, split or ())


@data_app.command("leakage")
def data_leakage(
    directory: Path,
    min_shared: Annotated[
        float, typer.Option(help="Fraction of shared k-mers that makes two sequences neighbors.")
    ] = 0.5,
    json: Annotated[Path | None, typer.Option(help="Also write the counts as JSON.")] = None,
    mmseqs: Annotated[
        bool, typer.Option("--mmseqs", help="Also search remote homologs with MMseqs2.")
    ] = False,
) -> None:
    """Count the sequences of each split that are similar to a training sequence."""
    from protlm.data_prep import leakage

    options = leakage.LeakageOptions(min_shared=min_shared, json=json, mmseqs=mmseqs)
    leakage.leakage(directory, options)
