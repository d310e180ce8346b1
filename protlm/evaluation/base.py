"""What an evaluation is: a model and a split in, plain values out."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from protlm.data.shards import SplitReader

if TYPE_CHECKING:
    from protlm.model.pretrained import PretrainedModel


@dataclass(frozen=True)
class EvaluationData:
    """A split to evaluate on, the training split for baselines, and the size of a batch."""

    split: SplitReader
    train: SplitReader
    tokens_per_batch: int


class Evaluation(ABC):
    """One evaluation: one module of `protlm.evaluation`, one YAML in `conf/evaluation`.

    The constructor's keyword arguments are its settings. `needs_data` says whether it reads a
    split; one that does not runs once and not once per split.
    """

    needs_data: bool = True

    @abstractmethod
    def run(self, model: "PretrainedModel", data: EvaluationData | None) -> dict[str, Any]:
        """Evaluates the model and returns values that JSON can hold."""
