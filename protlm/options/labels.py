"""The options of the commands that learn and predict labels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from protlm.config.data import TOKENS_PER_BATCH
from protlm.config.fields import Checked, above, at_least, flag
from protlm.options import shared
from protlm.options.relatives import RelativesOptions
from protlm.options.shared import Duplicates


class Task(StrEnum):
    """The kind of a label."""

    number = "number"
    one_class = "class"
    several_classes = "multi-label"
    residue_classes = "per-residue"
    residue_numbers = "per-residue-number"

    @property
    def is_number(self) -> bool:
        """Whether a number is predicted, not a class."""
        return self in (Task.number, Task.residue_numbers)

    @property
    def of_residues(self) -> bool:
        """Whether each residue has a label."""
        return self in (Task.residue_classes, Task.residue_numbers)


# What a header of a FASTA file says of the label.
Header = StrEnum("Header", ["header", "location"])
Separator = StrEnum("Separator", {"semicolon": ";", "comma": ",", "bar": "|"})
Head = StrEnum("Head", ["linear", "cnn"])


@dataclass(frozen=True)
class Form(Checked):
    """What a file does not say about its labels: the columns, and the names of its sets.

    Each of `columns` has 1 for the proteins of its class; a `header` has the label in its second
    word, `location` without DeepLoc's suffix; `splits` are files of identifiers, and `others` files
    of labels, by the name of their split, which of the first file is `split`.
    """

    column: str | None = flag("Column of the labels; default: label or target.", None, "--label")
    columns: tuple[str, ...] = flag(
        "Columns of 0 and 1, one for each class.", (), "--label-columns", words="[^-].*"
    )
    header: Header | None = flag(
        "In FASTA headers, the label is the second word (header), or its part before -M, -S or -U "
        "(location).",
        None,
        "--labels",
    )
    fold: str | None = flag(
        "Column with the fold of each protein; every fold is the test set once.", None
    )
    test_sets: tuple[str, ...] = flag(
        "Other names of splits that are test sets.", (), words="[^-].*"
    )
    splits: tuple[tuple[str, Path], ...] = flag(
        "SPLIT=FILE: identifiers of a split, one a line; repeatable.",
        (),
        words=r"[\w.-]+=.+",
        read="protlm.downstream.label_files:named_file",
    )
    split: str = ""
    others: tuple[tuple[str, Path], ...] = ()


@dataclass(frozen=True)
class LabelOptions(Checked):
    """How labels are read and split; without a task it is guessed.

    A cluster table has representative and member; `cluster` makes the clusters of sequences.
    """

    sequences: Path | None = flag(
        "A sequence file with the proteins, if the labels have no sequences.", None
    )
    task: Task | None = flag(
        "number, class, multi-label, per-residue, per-residue-number; default: guessed.", None
    )
    per_residue: bool = flag(
        "Labels are of residues: each has a letter or a number for every residue.", False
    )
    min_count: int = flag(
        "Ignore classes with fewer proteins, if a protein may have several classes.",
        1,
        allowed=at_least(0),
    )
    separator: Separator = flag(
        "What separates the classes of a protein: ; , or |", Separator.semicolon
    )
    cluster_table: Path | None = flag(
        "cluster.tsv of MMseqs2, for splits without homologs on both sides.",
        None,
        excludes=("cluster",),
    )
    cluster: Callable[[Sequence[str]], list[int]] | None = flag(
        "Make the clusters with MMseqs2, at 30 % identity.",
        None,
        read="protlm.data_prep.mmseqs:cluster_sequences",
    )
    form: Form = field(default_factory=Form)
    # Longer proteins are left out, as those are that the model does not accept.
    longest: int | None = None
    # Proteins to fit to that are relatives of one of the test are left out.
    apart: bool = False

    @property
    def of_residues(self) -> bool | None:
        """Whether residues have the labels; None to guess it."""
        return self.per_residue or (None if self.task is None else self.task.of_residues)


@dataclass(frozen=True)
class ProbeOptions(Checked):
    """The settings of a probe; no layers means all, from 0, the embedding, to the last.

    The head `cnn` is for labels of residues; for it, no layers means the last one. The features of
    an `autoencoder`, a `SparseAutoencoder`, are a predictor, too. The model reads proteins in the
    contexts of their `relatives`, `in_contexts` with the names of all proteins.
    """

    layers: tuple[int, ...] = flag("Layers to choose from; 0 is the embedding. Default: all.", ())
    tokens_per_batch: int = shared.tokens_per_batch()
    seed: int = shared.seed("Seed of splits, random weights and bootstrap.")
    head: Head = flag("linear; or cnn: two convolutions over residues.", Head.linear)
    relatives: RelativesOptions = field(default_factory=RelativesOptions)
    autoencoder: Any = None
    in_contexts: Any = None


@dataclass(frozen=True)
class ProbeRunOptions(Checked):
    """What `protlm probe` does beside fitting a probe."""

    features: Path | None = flag(
        "Folder of protlm features train: also probe these sparse features.", None
    )
    dry_run: bool = shared.dry_run("Print what is read, and compute nothing.")
    device: str = shared.device()


@dataclass(frozen=True)
class PredictOptions(Checked):
    """The settings of `protlm predict`."""

    tokens_per_batch: int = shared.tokens_per_batch()
    device: str = shared.device()
    duplicates: Duplicates = shared.duplicates()
    relatives: RelativesOptions = field(default_factory=RelativesOptions)


@dataclass(frozen=True)
class FinetuneSettings(Checked):
    """The settings of the training.

    Attributes:
        patience: epochs without a lower validation loss after which training stops.
        learning_rate: of AdamW, constant after the warm-up of a tenth of an epoch.
        batch_size: proteins per step, of all devices.
        tokens_per_batch: rows times length of a pass, at most; a larger batch takes several.
    """

    epochs: int = flag("Maximum number of epochs.", 20, allowed=at_least(1))
    patience: int = flag(
        "Stop after this many epochs without a lower validation loss.", 3, allowed=at_least(1)
    )
    learning_rate: float = flag("Learning rate of AdamW.", 1e-4, allowed=above(0))
    batch_size: int = flag("Proteins per step, of all devices.", 16, allowed=at_least(1))
    tokens_per_batch: int = TOKENS_PER_BATCH
    seed: int = shared.seed("Seed of splits, order and bootstrap.")
    device: str = "cpu"
    devices: int = flag("Number of GPUs, or of processes of CPUs.", 1, allowed=at_least(1))


@dataclass(frozen=True)
class FinetuneOptions(Checked):
    """The settings of `protlm finetune`; without a rank, all weights are trained."""

    training: FinetuneSettings = field(default_factory=FinetuneSettings)
    rank: int | None = flag(
        "Rank of LoRA adapters; default: train all weights.", None, "--lora", allowed=at_least(1)
    )
    targets: tuple[str, ...] = flag(
        "Layers that get adapters: query, key, value, output, up, gate, down.",
        ("query", "key", "value"),
        "--lora-targets",
        words="query|key|value|output|up|gate|down",
        needs="--lora RANK",
    )
    break_lock: bool = shared.break_lock()


@dataclass(frozen=True)
class BenchmarkOptions(Checked):
    """The settings of `protlm benchmark`; no tasks means all."""

    tasks: tuple[str, ...] = flag(
        "Tasks to run, by the names that --dry-run prints; default: all.", (), words="[^-].*"
    )
    probe: ProbeOptions = field(
        default_factory=ProbeOptions, metadata={"without": ("layers", "head", "relatives")}
    )
    device: str = shared.device()
    dry_run: bool = shared.dry_run()
    break_lock: bool = shared.break_lock()
