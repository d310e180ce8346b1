"""AFT-full: the attention-free transformer with a bias of every pair (arXiv 2105.14103, eq. 2)."""

from functools import partial
from typing import Annotated, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from protlm.attention.attention_free import (
    AttentionFree,
    Mixer,
    PositionBiases,
    power_of_two,
    rows_of_biases,
)
from protlm.attention.ops.numerics import recomputed
from protlm.attention.ops.sums import SoftmaxSums, floor_of, triangle
from protlm.config.fields import at_least

# Rows that are computed together: a power of two, as the triangle at their end requires.
_ROWS = 256


@final
class AftFull(AttentionFree):
    """A gated mean of all values by softmax(k + w) in every channel, w learned for each pair.

    Y_i = σ(q_i) ⊙ Σ_j e^(k_j + w_ij) ⊙ v_j / Σ_j e^(k_j + w_ij), over all j or, in causal mode, j ≤
    i, where w_ij = u_i·v_j of width `rank` is the same for all channels (Zhai et al., arXiv
    2105.14103, eq. 2 and section 3, "Parameterization"). Heads are only groups of channels. Learned
    positions are recommended in addition to w; rotary positions are not applied. Time grows with
    L², memory with L. In float32 a weight becomes 0 if w alone makes it e^69 times smaller than the
    largest of its row. There is no step-by-step form of bounded size, because every row weighs
    every position differently.
    """

    cost: ClassVar[str] = "L² K"
    advice: ClassVar[str] = "short proteins of one family, where positions are comparable"

    def __init__(self, *, max_length: int, rank: Annotated[int, at_least(1)] = 128) -> None:
        super().__init__()
        self.max_length = max_length
        self.biases = PositionBiases(max_length=max_length, rank=rank)

    def _outputs(
        self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, mask_BL: Tensor, *, causal: bool
    ) -> Tensor:
        # All heads use the same weights, which are computed for a block of rows at a time.
        means_of = partial(self._mixer(q_BHLK.shape[2], causal=causal), slice(None))
        return self._gated_means(q_BHLK, k_BHLK, v_BHLC, mask_BL, means_of)

    def _mixer(self, length: int, *, causal: bool) -> Mixer:
        return partial(self._means, causal=causal)

    def _means(self, _: slice, exponents: Tensor, values: Tensor, *, causal: bool) -> Tensor:
        length = values.shape[2]
        means = [
            # The weights of a block of rows are recomputed in the backward pass, not stored.
            recomputed(
                _means_of_rows,
                slice(start, min(start + _ROWS, length)),
                # Passed, so that the recomputation uses the same tables as this pass.
                (self.biases.u, self.biases.v),
                *(exponents, values, causal),
            )
            for start in range(0, length, _ROWS)
        ]
        return torch.cat(means, dim=2)

    def _bias(self, rows: slice, length: int, *, causal: bool) -> Tensor:
        return _bias_of(rows, length, self.biases.u, self.biases.v, causal=causal)


def _means_of_rows(
    rows: slice, tables: tuple[Tensor, Tensor], exponents: Tensor, values: Tensor, causal: bool
) -> Tensor:
    bias = _bias_of(rows, rows.stop if causal else values.shape[2], *tables, causal=causal)
    # A factor of the row cancels in the mean.
    weights = (bias - bias.detach().amax(dim=-1, keepdim=True)).exp()
    if not causal:
        return SoftmaxSums.terms(exponents, values).mixed(weights).mean()
    sums = _last_rows(exponents[:, :, rows], values[:, :, rows], weights[..., rows])
    if rows.start > 0:
        before = slice(rows.start)
        terms = SoftmaxSums.terms(exponents[:, :, before], values[:, :, before])
        sums = sums.plus(terms.mixed(weights[..., before]))
    return sums.mean()


def _bias_of(rows: slice, length: int, u: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    bias_ML = rows_of_biases(rows, length, u, v)
    if causal:
        # Keys that a row does not see must not determine its largest weight.
        position_L = torch.arange(length, device=bias_ML.device)
        bias_ML = bias_ML.masked_fill(position_L > position_L[rows, None], -torch.inf)
    return bias_ML[None]


def _last_rows(exponents: Tensor, values: Tensor, weights: Tensor) -> SoftmaxSums:
    """Computes the sums of some rows over their own keys, padded to a power of two."""
    length = values.shape[2]
    missing = power_of_two(length) - length
    x = F.pad(exponents, (0, 0, 0, missing), value=floor_of(exponents))
    v, weights = F.pad(values, (0, 0, 0, missing)), F.pad(weights, (0, missing, 0, missing))
    return triangle(x, v, weights).each(lambda sums: sums[:, :, :length])
