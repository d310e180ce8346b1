"""Means in linear time where only pairs of near positions have a bias."""

from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from protlm.attention.aft.sums import SoftmaxSums, floor_of, triangle
from protlm.attention.ops.blocks import from_blocks, to_blocks, with_neighbors

# The products of smaller blocks would be too small to be efficient.
_SMALLEST_BLOCK = 32


def power_of_two(count: int) -> int:
    """Returns the smallest power of two that is at least the count."""
    return 1 << (count - 1).bit_length()


def block_size(window: int, length: int) -> int:
    """Returns a power of two, so that a window reaches no farther than the next block."""
    return power_of_two(max(min(window, length), _SMALLEST_BLOCK))


def offsets(size: int, *, causal: bool, device: torch.device) -> Tensor:
    """Returns i - j of a block's rows i and the keys j of the block and its neighbors.

    Returns:
        (size, 2 size) for the block before and its own, or, unless causal, (size, 3 size) with the
        one after.
    """
    row = torch.arange(size, device=device)
    key = torch.arange(-size, size if causal else 2 * size, device=device)
    return row[:, None] - key


class WindowWeights(NamedTuple):
    """Weights e^w of near pairs, (H or 1, blocks or 1, M, 2M or 3M), and others, (.., .., M, 1)."""

    near: Tensor
    far: Tensor

    @classmethod
    def of(cls, bias: Tensor) -> Self:
        """Converts the biases w of the pairs of `offsets`; all other pairs have w = 0."""
        # A factor of the row cancels in the mean.
        largest = bias.detach().amax(dim=-1, keepdim=True).clamp(min=0)
        return cls((bias - largest).exp(), (-largest).exp())


def windowed_means(
    weights: WindowWeights, heads: slice, exponents: Tensor, values: Tensor, *, causal: bool
) -> Tensor:
    """Computes Σ_j e^(x_j + w_ij) v_j / Σ_j e^(x_j + w_ij) for each i, over all j or j ≤ i.

    Args:
        weights: e^w of all heads.
        heads: the heads of the exponents and values.
        exponents: x, (B, H, L, K), or (B, H, L, 1) if all channels have the same.
        values: (B, H, L, C).
        causal: whether row i sees only j ≤ i.
    """
    if len(weights.near) > 1:
        weights = WindowWeights(weights.near[heads], weights.far[heads])
    size = weights.near.shape[-2]
    blocks = to_blocks(exponents, size, value=floor_of(exponents)), to_blocks(values, size)
    sums = (_causal_sums if causal else _sums)(*blocks, weights)
    return from_blocks(sums.mean(), values.shape[2])


def _sums(exponents: Tensor, values: Tensor, weights: WindowWeights) -> SoftmaxSums:
    """Computes the sums of every row over all positions: (B, H, blocks, M, channels)."""
    reference = exponents.detach().amax(dim=(-3, -2), keepdim=True)
    terms = (exponents - reference).exp()

    def over_all(terms: Tensor) -> Tensor:
        near = torch.einsum(
            "...ml,b...lc->b...mc", weights.near, with_neighbors(terms, before=1, after=1)
        )
        totals = terms.sum(dim=-2, keepdim=True)
        before, after = (_before_previous(x) for x in (totals, totals.flip(-3)))
        return near + weights.far * (before + after.flip(-3))

    return SoftmaxSums(reference, over_all(terms * values), over_all(terms))


def _before_previous(totals: Tensor) -> Tensor:
    """Computes the sums of the totals of all blocks before the previous one."""
    return F.pad(totals.cumsum(dim=-3), (0, 0, 0, 0, 2, 0))[..., : totals.shape[-3], :, :]


def _causal_sums(exponents: Tensor, values: Tensor, weights: WindowWeights) -> SoftmaxSums:
    """Computes the sums of every row over the positions up to it.

    Each part has its own reference, and does not depend on what follows the row.
    """
    terms = SoftmaxSums.terms(exponents, values)
    totals = terms.total().each(lambda x: x.squeeze(-2))
    far = totals.running().shifted(2, -2).each(lambda x: x[..., None, :])
    previous, own = weights.near.chunk(2, dim=-1)
    sums = triangle(exponents, values, own)
    sums = sums.plus(terms.shifted(1, -3).mixed(previous))
    return sums.plus(far.scaled(weights.far))
