"""The commands that learn and predict labels. Each imports the heavy modules that it needs."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protlm.cli.options import (
    OUTPUT,
    BreakLock,
    Device,
    Duplicates,
    Model,
    SequenceFile,
    allowed_value,
    choice,
    model_or_default,
    new_output,
    numbers,
    option,
)
from protlm.config.data import TOKENS_PER_BATCH
from protlm.system.errors import UserError

if TYPE_CHECKING:
    from protlm.downstream.examples import LabelOptions

Sequences = Annotated[Path | None, option("A sequence file, for labels without sequences.")]
Column = Annotated[str | None, option("Column of the labels; default: label or target.", "--label")]
TaskName = Annotated[
    str | None,
    option(
        "number, class, multi-label, per-residue, per-residue-number; default: guessed.", "--task"
    ),
]
PerResidue = Annotated[bool, option("A label has an item for each residue.", "--per-residue")]
Files = Annotated[
    list[str], typer.Argument(help="TSV, CSV or FASTA files of labels, or SPLIT=FILE each.")
]
Header = Annotated[
    str | None,
    option("FASTA: header (its second word), or location, without -M, -S, -U.", "--labels"),
]
Columns = Annotated[list[str] | None, option("Columns of 0 and 1, one for each class.")]
TestSets = Annotated[list[str] | None, option("Names of splits that are test sets.")]
Splits = Annotated[list[str] | None, option("SPLIT=FILE: identifiers of a split, one a line.")]
Layers = Annotated[
    list[str] | None, option("Layers to choose from; 0: embedding; default: all.", "--layers")
]
ProbeModel = Annotated[
    Path | None, option("The model of the probe; default: as the probe names it.", "--model", "-m")
]
MinCount = Annotated[int, option("With several classes: ignore those of fewer proteins.")]
Separator = Annotated[str, option("Between the classes of one protein: ; , or |")]
ClusterTable = Annotated[
    Path | None, option("cluster.tsv of MMseqs2, for splits without homologs on both sides.")
]
Head = Annotated[str, option("linear, or cnn: two convolutions over residues.")]
Cluster = Annotated[bool, option("Make the clusters with MMseqs2, at 30 % identity.", "--cluster")]


def probe(
    labels: Files,
    output: Annotated[Path, new_output("The new folder of the probe.")],
    model: Model = None,
    sequences: Sequences = None,
    label: Column = None,
    task: TaskName = None,
    per_residue: PerResidue = False,
    header: Header = None,
    label_columns: Columns = None,
    test_sets: TestSets = None,
    splits: Splits = None,
    fold: Annotated[str | None, option("Column of folds: each is the test once.")] = None,
    head: Head = "linear",
    layers: Layers = None,
    features: Annotated[Path | None, option("Sparse features to probe beside states.")] = None,
    min_count: MinCount = 1,
    separator: Separator = ";",
    cluster_table: ClusterTable = None,
    cluster: Cluster = False,
    toks_per_batch: Annotated[int, option("Tokens per batch.")] = TOKENS_PER_BATCH,
    seed: Annotated[int, option("Seed of splits, random weights, bootstrap.")] = 0,
    dry_run: Annotated[bool, option("Only print what is read.", "--dry-run")] = False,
    device: Device = "auto",
) -> None:
    """Predict labels from frozen embeddings, and compare with baselines."""
    from protlm.commands.probe import describe_labels, probe_labels
    from protlm.downstream.label_files import form_of
    from protlm.downstream.probing import CNN, LINEAR, ProbeOptions

    reading = _reading(sequences, task, min_count, separator, cluster_table, cluster)
    path, form = form_of(labels, label, header, label_columns, test_sets, splits, fold)
    reading = replace(reading, per_residue=per_residue, form=form)
    head = allowed_value("--head", head, LINEAR, CNN)
    options = ProbeOptions(numbers("--layers", layers) or (), toks_per_batch, seed, head)
    model = model_or_default(model)
    if dry_run:
        describe_labels(path, model, reading, seed=seed, device=device)
    else:
        probe_labels(path, model, output, options, reading, features=features, device=device)


def finetune(
    labels: Files,
    output: Annotated[Path, option("The folder of the run.", *OUTPUT)],
    model: Model = None,
    sequences: Sequences = None,
    label: Column = None,
    task: TaskName = None,
    per_residue: PerResidue = False,
    header: Header = None,
    label_columns: Columns = None,
    test_sets: TestSets = None,
    splits: Splits = None,
    min_count: MinCount = 1,
    separator: Separator = ";",
    cluster_table: ClusterTable = None,
    cluster: Cluster = False,
    lora: Annotated[
        int | None, option("Rank of LoRA adapters; default: train all weights.")
    ] = None,
    lora_targets: Annotated[
        list[str] | None,
        option("Adapted layers, of query,key,value,output,up,gate,down; default: the first three."),
    ] = None,
    epochs: Annotated[int, option("Maximum number of epochs.")] = 20,
    patience: Annotated[
        int, option("Stop after this many epochs without a lower validation loss.")
    ] = 3,
    learning_rate: Annotated[float, option("Learning rate of AdamW.")] = 1e-4,
    batch_size: Annotated[int, option("Proteins per step, of all devices.")] = 16,
    seed: Annotated[int, option("Seed of splits, order, bootstrap.")] = 0,
    device: Device = "auto",
    devices: Annotated[int, option("Number of GPUs, or of processes of CPUs.")] = 1,
    break_lock: BreakLock = False,
) -> None:
    """Train all weights, or LoRA, on labels; resumable."""
    from protlm.commands.finetune import FinetuneOptions, finetune_labels
    from protlm.downstream.label_files import form_of
    from protlm.loading import pick_device
    from protlm.training.labels import FinetuneSettings
    from protlm.training.lora import TARGETS

    reading = _reading(sequences, task, min_count, separator, cluster_table, cluster)
    path, form = form_of(labels, label, header, label_columns, test_sets, splits)
    reading = replace(reading, per_residue=per_residue, form=form)
    training = FinetuneSettings(
        epochs=epochs,
        patience=patience,
        learning_rate=learning_rate,
        batch_size=batch_size,
        seed=seed,
        device=str(pick_device(device)),
        devices=devices,
    )
    if lora_targets and lora is None:
        raise UserError(f"--lora-targets {' '.join(lora_targets)} needs --lora RANK")
    options = FinetuneOptions(training, lora, tuple(lora_targets or TARGETS), break_lock)
    finetune_labels(path, model_or_default(model), output, options, reading, device=device)


def benchmark(
    name: Annotated[str, typer.Argument(help="flip, pbc, proteingym or contacts.")],
    folder: Annotated[
        Path, typer.Argument(help="A folder of its published files; of contacts, structures.")
    ],
    output: Annotated[Path, new_output("The new folder of results.")],
    model: Annotated[
        list[Path] | None,
        option("A model; several: -m again. Default: as in probe.", "--model", "-m"),
    ] = None,
    tasks: Annotated[list[str] | None, option("Only these, as --dry-run names them.")] = None,
    toks_per_batch: Annotated[int, option("Tokens per batch.")] = TOKENS_PER_BATCH,
    seed: Annotated[int, option("Seed of splits, random weights, bootstrap.")] = 0,
    dry_run: Annotated[bool, option("Only print the time and memory.", "--dry-run")] = False,
    device: Device = "auto",
    break_lock: BreakLock = False,
) -> None:
    """Run a benchmark's tasks, beside baselines and published figures; resumable."""
    from protlm.commands.benchmark import BenchmarkOptions
    from protlm.commands.benchmark import benchmark as run
    from protlm.downstream.probing import ProbeOptions

    probe = ProbeOptions(tokens_per_batch=toks_per_batch, seed=seed)
    options = BenchmarkOptions(tuple(tasks or ()), probe, device, dry_run, break_lock)
    run(name, folder, model or [model_or_default(None)], output, options)


def predict(
    fasta: SequenceFile,
    probe: Annotated[Path, option("A folder of protlm probe.", "--probe", "-p")],
    output: Annotated[Path, new_output("x.tsv or x.csv.")],
    model: ProbeModel = None,
    toks_per_batch: Annotated[int, option("Tokens per batch.")] = TOKENS_PER_BATCH,
    device: Device = "auto",
    duplicates: Duplicates = "error",
) -> None:
    """Predict labels of proteins or residues by a probe."""
    from protlm.commands.probe import predict as run
    from protlm.data.records import proteins

    run(
        fasta,
        probe,
        model,
        output,
        tokens_per_batch=toks_per_batch,
        device=device,
        duplicates=choice("--duplicates", duplicates, proteins.Duplicates),
    )


def _reading(
    sequences: Path | None,
    task: str | None,
    min_count: int,
    separator: str,
    cluster_table: Path | None,
    cluster: bool,
) -> "LabelOptions":
    from protlm.data_prep import mmseqs
    from protlm.downstream.examples import LabelOptions
    from protlm.downstream.tasks import Task

    return LabelOptions(
        sequences=sequences,
        task=None if task is None else choice("--task", task, Task),
        min_count=min_count,
        separator=allowed_value("--separator", separator, *";,|"),
        cluster_table=cluster_table,
        cluster=mmseqs.cluster_sequences if cluster else None,
    )
