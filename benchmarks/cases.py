"""What is measured: one contender at one mode, length and precision, and the sizes all share."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

NUM_HEADS, HEAD_DIM = 8, 64
MODEL_DIM = NUM_HEADS * HEAD_DIM
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Attention as it is timed: a function of queries, keys and values, BHLK, BHLK and BHLC.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

# Names of contenders that the ratios and the bars speak of.
SDPA = "SDPA"
PERFORMER_PYTORCH = "performer-pytorch"
RETURNS_V = "returns V"
TWO_FLASH = "two flash calls"


@dataclass(frozen=True)
class Case:
    """A contender, its number of random features where it has any, and what it is given."""

    contender: str
    features: int | None
    causal: bool
    length: int
    dtype: str = "fp32"

    @property
    def mode(self) -> str:
        """`causal` or `bidirectional`."""
        return "causal" if self.causal else "bidirectional"

    @property
    def label(self) -> str:
        """The contender with its features, as tables name it."""
        return self.contender if self.features is None else f"{self.contender} m={self.features}"

    @property
    def token_heads(self) -> int:
        """Positions times heads: what costs are divided by."""
        return self.length * NUM_HEADS

    def at(self, length: int) -> "Case":
        """The same at another length."""
        return replace(self, length=length)
