"""The commands that learn and predict labels. Each imports the heavy modules that it needs."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protlm.cli.options import (
    BreakLock,
    Device,
    Duplicates,
    Model,
    SequenceFile,
    choice,
    model_or_default,
)
from protlm.system.errors import UserError

if TYPE_CHECKING:
    from protlm.downstream.examples import LabelOptions

Sequences = Annotated[
    Path | None, typer.Option(help="A sequence file, for labels without sequences.")
]
Column = Annotated[
    str | None, typer.Option("--label", help="Column of the labels; default: label or target.")
]
TaskName = Annotated[
    str | None,
    typer.Option("--task", help="number, class, multi-label, per-residue; default: guessed."),
]
PerResidue = Annotated[
    bool, typer.Option("--per-residue", help="A label has one letter for each residue.")
]
Layers = Annotated[
    list[int] | None,
    typer.Option("--layers", help="Layers to choose from; 0: embedding; default: all."),
]
MinCount = Annotated[
    int, typer.Option(help="With several classes: ignore those of fewer proteins.")
]
Separator = Annotated[str, typer.Option(help="Between the classes of one protein: ; , or |")]
ClusterTable = Annotated[
    Path | None,
    typer.Option(help="cluster.tsv of MMseqs2, for splits without homologs on both sides."),
]
Cluster = Annotated[
    bool, typer.Option("--cluster", help="Make the clusters with MMseqs2, at 30 % identity.")
]


def probe(
    labels: Annotated[Path, typer.Argument(help="TSV, CSV or FASTA file of labels.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The new folder of the probe.")],
    model: Model = None,
    sequences: Sequences = None,
    label: Column = None,
    task: TaskName = None,
    per_residue: PerResidue = False,
    layers: Layers = None,
    min_count: MinCount = 1,
    separator: Separator = ";",
    cluster_table: ClusterTable = None,
    cluster: Cluster = False,
    toks_per_batch: Annotated[int, typer.Option(help="Tokens per batch.")] = 16_384,
    seed: Annotated[int, typer.Option(help="Seed of splits, random weights, bootstrap.")] = 0,
    device: Device = "auto",
) -> None:
    """Predict labels from frozen embeddings, and compare with baselines."""
    from protlm.commands.probe import probe_labels
    from protlm.downstream.probing import ProbeOptions

    reading = _reading(sequences, label, task, min_count, separator, cluster_table, cluster)
    reading = replace(reading, per_residue=per_residue)
    options = ProbeOptions(tuple(layers or ()), toks_per_batch, seed)
    probe_labels(labels, model_or_default(model), output, options, reading, device=device)


def finetune(
    labels: Annotated[Path, typer.Argument(help="TSV, CSV or FASTA file of labels.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of the run.")],
    model: Model = None,
    sequences: Sequences = None,
    label: Column = None,
    task: TaskName = None,
    per_residue: PerResidue = False,
    min_count: MinCount = 1,
    separator: Separator = ";",
    cluster_table: ClusterTable = None,
    cluster: Cluster = False,
    lora: Annotated[
        int | None, typer.Option(help="Rank of LoRA adapters; default: train all weights.")
    ] = None,
    lora_targets: Annotated[
        str | None,
        typer.Option(
            help="Adapted layers, of query,key,value,output,up,gate,down; default: the first three."
        ),
    ] = None,
    epochs: Annotated[int, typer.Option(help="Maximum number of epochs.")] = 20,
    patience: Annotated[
        int, typer.Option(help="Stop after this many epochs without a lower validation loss.")
    ] = 3,
    learning_rate: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 1e-4,
    batch_size: Annotated[int, typer.Option(help="Proteins per step, of all devices.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of splits, order, bootstrap.")] = 0,
    device: Device = "auto",
    devices: Annotated[int, typer.Option(help="Number of GPUs, or of processes of CPUs.")] = 1,
    break_lock: BreakLock = False,
) -> None:
    """Train all weights, or LoRA, on labels; resumable."""
    from protlm.commands.finetune import FinetuneOptions, finetune_labels
    from protlm.loading import pick_device
    from protlm.training.labels import FinetuneSettings

    reading = _reading(sequences, label, task, min_count, separator, cluster_table, cluster)
    reading = replace(reading, per_residue=per_residue)
    training = FinetuneSettings(
        epochs=epochs,
        patience=patience,
        learning_rate=learning_rate,
        batch_size=batch_size,
        seed=seed,
        device=str(pick_device(device)),
        devices=devices,
    )
    options = FinetuneOptions(training, lora, break_lock=break_lock)
    if lora_targets is not None:
        if lora is None:
            raise UserError(f"--lora-targets {lora_targets} needs --lora RANK")
        options = replace(options, targets=tuple(map(str.strip, lora_targets.split(","))))
    finetune_labels(labels, model_or_default(model), output, options, reading, device=device)


def predict(
    fasta: SequenceFile,
    probe: Annotated[Path, typer.Option("--probe", "-p", help="A folder of protlm probe.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="x.tsv or x.csv.")],
    model: Model = None,
    toks_per_batch: Annotated[int, typer.Option(help="Tokens per batch.")] = 16_384,
    device: Device = "auto",
    duplicates: Duplicates = "error",
) -> None:
    """Predict labels of proteins or residues by a probe."""
    from protlm.commands.probe import predict as run
    from protlm.data.records import proteins

    run(
        fasta,
        probe,
        model_or_default(model),
        output,
        tokens_per_batch=toks_per_batch,
        device=device,
        duplicates=choice("--duplicates", duplicates, proteins.Duplicates),
    )


def _reading(
    sequences: Path | None,
    column: str | None,
    task: str | None,
    min_count: int,
    separator: str,
    cluster_table: Path | None,
    cluster: bool,
) -> "LabelOptions":
    from protlm.data_prep import mmseqs
    from protlm.downstream.examples import LabelOptions
    from protlm.downstream.tasks import Task
    from protlm.system.errors import refuse_unknown

    if task is not None:
        refuse_unknown("--task", task, list(Task))
    refuse_unknown("--separator", separator, ";,|")
    return LabelOptions(
        sequences=sequences,
        column=column,
        task=None if task is None else Task(task),
        min_count=min_count,
        separator=separator,
        cluster_table=cluster_table,
        cluster=mmseqs.cluster_sequences if cluster else None,
    )
