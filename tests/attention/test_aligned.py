"""The aligned window: exact softmax over the own window and what is near in each relative."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from protlm.attention.ops import aligned
from protlm.attention.ops.aligned import AlignedKeys, Sight, aligned_softmax, aligned_weights
from protlm.attention.ops.blocks import Window
from protlm.attention.ops.key_value_cache import KeyValueCache
from protlm.bounds import Bounds
from tests.attention.cases import LargestTensor, visible_softmax
from tests.attention.test_cost import kept
from tests.rounding import condition_of, error_bound

# Lengths of the proteins of each family of each row. A row has 400 positions.
ROWS = [[[1, 2, 63, 64, 65], [40]], [[65, 1, 64, 2, 63], [70, 9, 90]], [[3, 3]]]
LENGTH = 400
FULL, ORDERED, CAUSAL = (Window(8, 8), True), (Window(8, 8), False), (Window(16, 0), False)
MODES = pytest.mark.parametrize("mode", [FULL, ORDERED, CAUSAL], ids=["full", "ordered", "causal"])


@dataclass(frozen=True)
class Row:
    """Joined rows, and for each position the numbers of its family and protein, -1 at padding."""

    bounds: Bounds
    family_L: Tensor
    protein_L: Tensor
    position_L: Tensor

    @classmethod
    def of(cls, rows: Sequence[Sequence[Sequence[int]]] = ROWS, *, positions: str = "restart") -> "Row":
        total, number, spans, families = LENGTH * len(rows), 0, [], []
        family, protein, position = (torch.full((total,), -1) for _ in range(3))
        for row, members in enumerate(rows):
            start = LENGTH * row
            for lengths in members:
                first = start
                for length in lengths:
                    there, own = slice(start, start + length), torch.arange(length)
                    if positions == "run":
                        own = own + start - first
                    if positions == "aligned":
                        # A shift, and an insertion of up to five residues at one column.
                        own = own.clamp(max=7).maximum(own - 5) + 3 * number - 9
                    family[there], protein[there], position[there] = len(families), number, own
                    spans.append((start, start + length))
                    start, number = start + length, number + 1
                families.append(len(lengths))
        kinds = {"restart": {}, "run": {"running": True}, "aligned": {"aligned": position.numpy()}}
        bounds = Bounds.of(spans, (len(rows), LENGTH), longest=90, families=families, **kinds[positions])
        return cls(bounds, family, protein, position)

    @property
    def is_real_L(self) -> Tensor:
        return self.family_L >= 0

    def seen(self, sight: Sight) -> Tensor:
        """The definition, LL: of each query, the keys that it sees."""
        index_L = torch.arange(len(self.family_L))
        apart = self.protein_L - self.protein_L[:, None]
        seen = (apart != 0 if sight.later else apart < 0) & (
            (self.position_L - self.position_L[:, None]).abs() <= sight.around
        )
        if sight.window is not None:
            offset = index_L - index_L[:, None]
            near = (offset >= -sight.window.before) & (offset <= sight.window.after)
            seen = seen | near & (apart == 0)
        real = self.is_real_L
        return seen & (self.family_L == self.family_L[:, None]) & real & real[:, None]

    def heads(self, *, padding: float = torch.nan, seed: int = 0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shapes = [(1, 2, len(self.family_L), width) for width in (6, 6, 5)]
        heads = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        return [x.masked_fill_(~self.is_real_L[:, None], padding) for x in heads]


def reference(heads: Sequence[Tensor], row: Row, sight: Sight) -> Tensor:
    q, k, v = (x.where(row.is_real_L[:, None], 0) for x in heads)
    return visible_softmax(2 * q @ k.mT / q.shape[-1] ** 0.5 / 2, row.seen(sight)) @ v
