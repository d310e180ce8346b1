"""Learned biases of pairs of positions, w_ij = u_i·v_j (arXiv 2105.14103, section 3)."""

import torch
from torch import Tensor, nn

from protlm.attention.blocks import to_blocks, with_neighbours
from protlm.attention.precision import wide
from protlm.errors import UserError

_STANDARD_DEVIATION = 0.01


class PositionBiases(nn.Module):
    """w = u vᵀ, one for all channels.

    Args:
        max_length: positions that there are biases of.
        rank: width d' of u and v.

    Raises:
        UserError: a rank below 1.
    """

    def __init__(self, *, max_length: int, rank: int) -> None:
        super().__init__()
        if rank < 1:
            raise UserError(
                f"attention.rank={rank} must be at least 1, a whole number; type attention.rank=128"
            )
        # The rows of u and of v; the letters are the paper's.
        self.u = nn.Parameter(_STANDARD_DEVIATION * torch.randn(max_length, rank))
        self.v = nn.Parameter(_STANDARD_DEVIATION * torch.randn(max_length, rank))

    def rows(self, rows: slice, length: int) -> Tensor:
        """The biases of some rows and the first `length` keys, ML."""
        return rows_of_biases(rows, length, self.u, self.v)

    def blocks(self, length: int, size: int, *, causal: bool) -> Tensor:
        """Those of each block's rows and the keys of it and its neighbours.

        Returns:
            (1, S, M, 2M), or (1, S, M, 3M) unless causal; 0 beyond the ends.
        """
        u, v = (to_blocks(wide(x[None, None, :length]), size) for x in (self.u, self.v))
        return (u @ with_neighbours(v, before=1, after=0 if causal else 1).mT)[0]


def rows_of_biases(rows: slice, length: int, u: Tensor, v: Tensor) -> Tensor:
    """The biases u vᵀ of some rows and the first `length` keys, ML."""
    return wide(u[:length])[rows] @ wide(v[:length]).mT
