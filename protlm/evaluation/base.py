"""The interface of evaluations: a model and a split in, plain values out."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protlm.analysis.bootstrap import MODEL, RANDOM
from protlm.data.shards.data_set import SplitReader
from protlm.data.tables import is_table
from protlm.data.vocabulary import VOCABULARY
from protlm.system.errors import OptionError

if TYPE_CHECKING:
    from protlm.model.pretrained import PretrainedModel
    from protlm.model.relatives import InContexts

# The name used instead of a split by evaluations that read no split.
NO_SPLIT = "any"


def compared(model: "PretrainedModel", seed: int) -> "dict[str, PretrainedModel]":
    """Returns the model, and the same architecture with random weights, by name."""
    return {MODEL: model, RANDOM: model.with_random_weights(seed)}


@dataclass(frozen=True)
class ResultTable:
    """A table of results for the terminal, its cells already formatted, and lines below it."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class EvaluationData:
    """A split to evaluate on, the training split for baselines, and the tokens of a batch.

    Its sequences are read in `contexts` of their relatives, if there are any.
    """

    split: SplitReader
    train: SplitReader
    tokens_per_batch: int
    name: str = "split"
    contexts: "InContexts | None" = None

    def queries(self) -> Iterator[tuple[str, str]]:
        """Yields the names and the residues of the split."""
        return map(self.query, range(len(self.split)))

    def query(self, number: int) -> tuple[str, str]:
        """Returns the name and the residues of a sequence of the split."""
        return self.split.identifier(number), VOCABULARY.decode(self.split[number])


def table_path(name: str, path: str | None) -> Path | None:
    """Returns the path of a table that an evaluation writes, by the name of its setting."""
    if path is not None and not is_table(Path(path)):
        raise OptionError(
            lambda at: (
                f"{at}{name}={path} is not the name of a table; type for instance "
                f"{at}{name}=sums.tsv"
            )
        )
    return None if path is None else Path(path)


def of_split(path: Path, split: str) -> Path:
    """Returns the path of what is written for a split.

    >>> of_split(Path("sums.tsv"), "test").name
    'sums.test.tsv'
    """
    return path.with_name(f"{path.stem}.{split}{path.suffix}")


class Evaluation(ABC):
    """One evaluation: one module of `protlm.evaluation`, one YAML in `conf/evaluation`.

    The constructor's keyword arguments are its settings, described in the YAML and in
    docs/evaluate.md. An evaluation without `needs_data` reads no split and runs once instead of
    once per split; one without `reads_tokens` reads residues, and takes models with any alphabet.
    One without `sees_relatives` reads sequences alone, and one with `draws_contexts` after those
    that are drawn.
    """

    needs_data: bool = True
    reads_tokens: bool = True
    sees_relatives: bool = False
    draws_contexts: bool = False
    # A figure that the command draws of the results of each split.
    figure: Path | None = None

    def outputs_of(self, split: str) -> list[Path]:
        """Returns the files that `run` writes for a split."""
        return []

    @abstractmethod
    def run(self, model: "PretrainedModel", data: EvaluationData | None) -> dict[str, Any]:
        """Evaluates the model and returns values that JSON can hold."""

    @abstractmethod
    def table(self, results: Mapping[str, dict[str, Any]]) -> ResultTable:
        """Builds the table of the values of `run`, by split (`NO_SPLIT` where none is read)."""
