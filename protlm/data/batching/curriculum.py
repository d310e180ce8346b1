"""A length curriculum: shorter rows at the start of training."""

from collections.abc import Sequence
from itertools import pairwise
from typing import final

from protlm.system.errors import UserError


@final
class Curriculum:
    """The maximum length of rows as a function of the samples that a run has consumed.

    Args:
        stages: pairs of a number of samples, beginning with 0, and the length from there on; empty
            for no curriculum.
    """

    def __init__(self, stages: Sequence[Sequence[int]] = ()) -> None:
        self._stages = [tuple(stage) for stage in stages]
        if not self._stages:
            return
        if any(len(stage) != 2 for stage in self._stages) or self._stages[0][0] != 0:
            raise UserError(
                f"curriculum={self} must be pairs of samples and length, beginning with 0 samples, "
                "for instance [[0,256],[1000000,1024]]"
            )
        starts, lengths = zip(*self._stages, strict=True)
        if lengths[0] < 3 or not all(
            a < b for numbers in (starts, lengths) for a, b in pairwise(numbers)
        ):
            raise UserError(
                f"curriculum={self}: samples and lengths must be ascending, and lengths at least 3"
            )

    def __str__(self) -> str:
        return str([list(stage) for stage in self._stages]).replace(" ", "")

    def check(self, max_length: int) -> None:
        """Rejects lengths above the length of rows."""
        longest = max((length for _, length in self._stages), default=0)
        if longest > max_length:
            raise UserError(
                f"curriculum={self} reaches {longest}, more than max_length={max_length}; "
                f"type data.max_length={longest}, or remove the last stages"
            )

    def max_length(self, samples: int) -> int | None:
        """Returns the maximum length after a number of samples; None without a curriculum.

        >>> Curriculum([[0, 256], [1_000, 512]]).max_length(999)
        256
        """
        return max((length for start, length in self._stages if start <= samples), default=None)

    def describe(self) -> str:
        """Describes the stages for the log; empty without a curriculum.

        >>> Curriculum([[0, 256], [1_000, 512]]).describe()
        'rows of 256 tokens, 512 after 1,000 samples'
        """
        if not self._stages:
            return ""
        (_, first), *others = self._stages
        later = [f"{length} after {samples:,} samples" for samples, length in others]
        return ", ".join([f"rows of {first} tokens", *later])
