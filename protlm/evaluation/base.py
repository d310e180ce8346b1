"""The interface of evaluations: a model and a split in, plain values out."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protlm.analysis.bootstrap import MODEL, RANDOM
from protlm.data.shards.data_set import SplitReader
from protlm.data.vocabulary import VOCABULARY

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


class Evaluation(ABC):
    """One evaluation: one module of `protlm.evaluation`, one YAML in `conf/evaluation`.

    The constructor's keyword arguments are its settings, described in the YAML and in
    docs/evaluate.md. An evaluation without `needs_data` reads no split and runs once instead of
    once per split, and one without `sees_relatives` reads sequences alone.
    """

    needs_data: bool = True
    sees_relatives: bool = False

    def output_of(self, split: str) -> Path | None:
        """Returns the file that `run` writes for a split, if any."""
        return None

    @abstractmethod
    def run(self, model: "PretrainedModel", data: EvaluationData | None) -> dict[str, Any]:
        """Evaluates the model and returns values that JSON can hold."""

    @abstractmethod
    def table(self, results: Mapping[str, dict[str, Any]]) -> ResultTable:
        """Builds the table of the values of `run`, by split (`NO_SPLIT` where none is read)."""
