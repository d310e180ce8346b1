"""The commands that look inside a model. Each imports the heavy modules that it needs."""

from pathlib import Path
from typing import Annotated

import typer

from protlm.cli.options import (
    Device,
    Duplicates,
    Heads,
    Layers,
    Model,
    Output,
    SequenceFile,
    allowed_value,
    choice,
    model_or_default,
    option,
)


def attention(
    fasta: SequenceFile,
    output: Output,
    model: Model = None,
    layers: Layers = None,
    heads: Heads = None,
    dtype: Annotated[str, option("float32 or float16.")] = "float32",
    device: Device = "auto",
    duplicates: Duplicates = "error",
    figure: Annotated[
        Path | None, option("Also draw a PNG; the input must contain one protein.")
    ] = None,
) -> None:
    """Write exact attention maps, computed in blocks of rows."""
    from protlm.commands.attention import MapOptions, attention_maps
    from protlm.data.records.proteins import Duplicates

    options = MapOptions(
        layers=tuple(layers) if layers else None,
        heads=tuple(heads) if heads else None,
        dtype=allowed_value("--dtype", dtype, "float32", "float16"),
        device=device,
        duplicates=choice("--duplicates", duplicates, Duplicates),
        figure=figure,
    )
    attention_maps(fasta, model_or_default(model), output, options)


def contacts(
    proteins: Annotated[
        list[Path], typer.Argument(help="Files of proteins, or PDB or mmCIF structures.")
    ],
    output: Output,
    model: Model = None,
    fit: Annotated[
        Path | None,
        option(
            "A folder of structures to fit on, or the NAME.fit.json of an earlier fit; "
            "default: the shipped structures."
        ),
    ] = None,
    chain: Annotated[
        str | None,
        option("The chain (mmCIF: auth_asym_id); default: the first protein chain."),
    ] = None,
    device: Device = "auto",
    figure: Annotated[
        Path | None,
        option("Also draw a PNG; of several proteins, NAME.PROTEIN.png each."),
    ] = None,
    duplicates: Duplicates = "error",
) -> None:
    """Predict contact maps from attention maps."""
    from protlm.commands.contacts import ContactOptions
    from protlm.commands.contacts import contacts as run
    from protlm.data.records.proteins import Duplicates

    repeated = choice("--duplicates", duplicates, Duplicates)
    options = ContactOptions(fit, chain, device, figure, repeated)
    run(proteins, model_or_default(model), output, options)


def inspect(
    protein: Annotated[
        Path, typer.Argument(help="A sequence file of one protein, or a PDB or mmCIF structure.")
    ],
    output: Annotated[Path, option("The HTML page to write.", "--output", "-o")],
    model: Annotated[
        list[Path] | None,
        option("As for protlm attention; give it twice for two models.", "--model", "-m"),
    ] = None,
    layers: Layers = None,
    heads: Heads = None,
    fit: Annotated[
        list[Path] | None,
        option("NAME.fit.json of protlm contacts, to show predicted contacts."),
    ] = None,
    chain: Annotated[
        str | None,
        option("The chain (mmCIF: auth_asym_id); default: the first protein chain."),
    ] = None,
    predictions: Annotated[bool, option("Predict every residue: one pass for each.")] = True,
    device: Device = "auto",
) -> None:
    """Write one page that shows a model, or two, on a protein."""
    from protlm.commands.inspect import InspectOptions
    from protlm.commands.inspect import inspect as run

    options = InspectOptions(
        layers=tuple(layers) if layers else None,
        heads=tuple(heads) if heads else None,
        fits=tuple(fit or ()),
        chain=chain,
        predictions=predictions,
        device=device,
    )
    run(protein, model or [model_or_default(None)], output, options)
