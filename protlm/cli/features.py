"""The commands of sparse features. Each imports the heavy modules that it needs."""

from pathlib import Path
from typing import Annotated

import typer

from protlm.cli.options import (
    OUTPUT,
    BreakLock,
    Device,
    Model,
    choice,
    model_or_default,
    new_output,
    option,
)

features_app = typer.Typer(help="Learn sparse features of a layer, and name them.")


@features_app.command("train")
def train_features(
    layer: Annotated[int, option("0: embedding; n: output of block n; -1: last.")],
    data: Annotated[Path, option("A data set of protlm prepare; its split train is read.")],
    output: Annotated[Path, option("The new folder of the features.", *OUTPUT)],
    model: Model = None,
    latents: Annotated[int, option("Number of features.")] = 4096,
    k: Annotated[int, option("Active features of a residue.")] = 32,
    residues: Annotated[int, option("Residues to learn from.")] = 2_000_000,
    seed: Annotated[int, option("Of the first weights and of the order of proteins.")] = 0,
    sparsity: Annotated[str, option("topk or batch-topk.")] = "topk",
    random_weights: Annotated[
        int | None, option("Seed of an untrained model in place of the trained one: a control.")
    ] = None,
    device: Device = "auto",
    break_lock: BreakLock = False,
) -> None:
    """Train a sparse autoencoder on the hidden states of a layer; resumable."""
    from protlm.analysis.features.autoencoder import Sparsity
    from protlm.commands.features import train_features as run

    kind = choice("--sparsity", sparsity, Sparsity)
    typed = {"latents": latents, "k": k, "residues": residues, "seed": seed, "sparsity": kind}
    typed["random_weights"] = random_weights
    run(
        model_or_default(model),
        data,
        output,
        typed,
        layer=layer,
        device=device,
        break_lock=break_lock,
    )


@features_app.command("describe")
def describe_features(
    features: Annotated[Path, typer.Argument(help="A folder of protlm features train.")],
    annotations: Annotated[
        Path, option("UniProt .dat or .xml, labels of residues, or a folder of structures.")
    ],
    output: Annotated[Path, new_output("The new folder of tables.")],
    model: Model = None,
    proteins: Annotated[Path | None, option("Sequences, for labels without sequences.")] = None,
    random: Annotated[Path | None, option("Features of --random-weights: a control.")] = None,
    max_proteins: Annotated[int, option("Proteins drawn, without relatives.")] = 1000,
    max_residues: Annotated[int, option("Longer proteins are left out.")] = 1024,
    permutations: Annotated[int, option("Exchanges of annotations, for chance.")] = 100,
    seed: Annotated[int, option("Of the draw, the exchanges and the masks.")] = 0,
    device: Device = "auto",
) -> None:
    """Name features by annotations, beside controls and chance."""
    from protlm.commands.features import describe_features as run

    typed = {"max_proteins": max_proteins, "max_residues": max_residues, "seed": seed}
    typed |= {"random": random, "permutations": permutations}
    source = annotations, proteins
    run(features, model_or_default(model), source, output, typed, device=device)
