"""AFT-simple: the attention-free transformer without position biases (arXiv 2105.14103)."""

from typing import ClassVar, final

import torch
from torch import Tensor

from protlm.attention.attention_free import AttentionFree, Mixer
from protlm.attention.base import Context, Recurrent
from protlm.attention.ops.numerics import upcast
from protlm.attention.ops.sums import SoftmaxSums


@final
class AftSimple(AttentionFree, Recurrent[SoftmaxSums]):
    """A gated mean of all values, weighted by softmax(k) over positions in every channel.

    Y_i = σ(q_i) ⊙ Σ_j e^(k_j) ⊙ v_j / Σ_j e^(k_j), without a 1/√K, over all j or, in causal mode,
    j ≤ i (Zhai et al., arXiv 2105.14103, section 3, "AFT-simple"). There is no product of queries
    and keys, and without the gate all outputs of the bidirectional form would be the same. Heads
    are only groups of channels. It needs `model.positions=learned` or `sinusoidal`: rotary
    positions are not applied, so with them the model has no positions at all.

    The recurrent state is the two sums and the largest key so far, in float32.
    """

    cost: ClassVar[str] = "L K"
    advice: ClassVar[str] = "the cheapest of all, for a baseline; it cannot relate two positions"

    def _mixer(self, length: int, *, causal: bool) -> Mixer:
        return _running_means if causal else _means

    def _bias(self, rows: slice, length: int, *, causal: bool) -> Tensor:
        return torch.zeros(())

    def initial_state(self, k_BHK: Tensor, v_BHC: Tensor) -> SoftmaxSums:
        return SoftmaxSums.none(upcast(k_BHK), upcast(v_BHC))

    @torch.no_grad()
    def step(
        self, state: SoftmaxSums, q_BHK: Tensor, k_BHK: Tensor, v_BHC: Tensor, context: Context
    ) -> tuple[SoftmaxSums, Tensor]:
        k_BHK = upcast(k_BHK)
        state = state.plus(SoftmaxSums(k_BHK, upcast(v_BHC), torch.ones_like(k_BHK)))
        return state, (upcast(q_BHK).sigmoid() * state.mean()).to(v_BHC.dtype)


def _means(_: slice, exponents: Tensor, values: Tensor) -> Tensor:
    return SoftmaxSums.terms(exponents, values).total().mean().expand_as(values)


def _running_means(_: slice, exponents: Tensor, values: Tensor) -> Tensor:
    """Computes the mean over the positions up to each."""
    # Each position is a separate row at first, so that it has its own reference.
    terms = SoftmaxSums.terms(exponents[..., None, :], values[..., None, :])
    return terms.each(lambda x: x.squeeze(-2)).running().mean()
