"""Learned biases of pairs of positions, w_ij = u_i·v_j (arXiv 2105.14103, section 3)."""

import torch
from torch import Tensor, nn

from protlm.attention.ops.blocks import to_blocks, with_neighbors
from protlm.attention.ops.numerics import upcast
from protlm.attention.ops.options import require_at_least

_STANDARD_DEVIATION = 0.01


class PositionBiases(nn.Module):
    """Tables u and v of the biases w = u vᵀ, which all channels use.

    Args:
        max_length: number of rows of u and of v.
        rank: width d' of u and v.
    """

    def __init__(self, *, max_length: int, rank: int) -> None:
        super().__init__()
        require_at_least("rank", rank, 1, example=128)
        # The letters are the paper's.
        self.u = nn.Parameter(_STANDARD_DEVIATION * torch.randn(max_length, rank))
        self.v = nn.Parameter(_STANDARD_DEVIATION * torch.randn(max_length, rank))

    def rows(self, rows: slice, length: int) -> Tensor:
        """Returns the biases of some rows and the first `length` keys, ML."""
        return rows_of_biases(rows, length, self.u, self.v)

    def blocks(self, length: int, size: int, *, causal: bool) -> Tensor:
        """Returns the biases of each block's rows and the keys of the block and its neighbors.

        Returns:
            (1, S, M, 2M), or (1, S, M, 3M) unless causal; 0 beyond the ends.
        """
        u, v = (to_blocks(upcast(x[None, None, :length]), size) for x in (self.u, self.v))
        return (u @ with_neighbors(v, before=1, after=0 if causal else 1).mT)[0]


def rows_of_biases(rows: slice, length: int, u: Tensor, v: Tensor) -> Tensor:
    """Returns the biases u vᵀ of some rows and the first `length` keys, ML."""
    return upcast(u[:length])[rows] @ upcast(v[:length]).mT
