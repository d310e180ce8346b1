"""AFT-simple: the attention-free transformer without position biases (arXiv 2105.14103)."""

from typing import ClassVar, final

import torch
from torch import Tensor

from protlm.attention.aft.base import AttentionFree, Mixer
from protlm.attention.aft.sums import Sums
from protlm.attention.base import Recurrent
from protlm.attention.precision import wide


@final
class AftSimple(AttentionFree, Recurrent[Sums]):
    """A gated mean of all values, weighted by softmax(k) over positions in every channel.

    Y_i = σ(q_i) ⊙ Σ_j e^(k_j) ⊙ v_j / Σ_j e^(k_j), without a 1/√K, over all j or, causal, j ≤ i.
    Zhai et al., arXiv 2105.14103, section 3, "AFT-simple". There is no product of queries and keys,
    and without a gate all outputs of the bidirectional form would be the same; heads only hold
    channels. Learned positions suit it: rotary ones are harmless, but weigh a value by its own
    position only.

    Its recurrent state is the two sums beside the largest key so far, in float32.
    """

    cost: ClassVar[str] = "L K"
    advice: ClassVar[str] = "the cheapest of all, for a baseline; it cannot relate two positions"

    def _mixer(self, length: int, *, causal: bool) -> Mixer:
        return _running_means if causal else _means

    def _bias(self, rows: slice, length: int, *, causal: bool) -> Tensor:
        return torch.zeros(())

    def initial_state(self, k_BHK: Tensor, v_BHC: Tensor) -> Sums:
        """See `Recurrent.initial_state`."""
        return Sums.none(wide(k_BHK), wide(v_BHC))

    @torch.no_grad()
    def step(
        self, state: Sums, q_BHK: Tensor, k_BHK: Tensor, v_BHC: Tensor, *, hidden_BD: Tensor
    ) -> tuple[Sums, Tensor]:
        """See `Recurrent.step`."""
        k_BHK = wide(k_BHK)
        state = state.plus(Sums(k_BHK, wide(v_BHC), torch.ones_like(k_BHK)))
        return state, (wide(q_BHK).sigmoid() * state.mean()).to(v_BHC.dtype)


def _means(_: slice, exponents: Tensor, values: Tensor) -> Tensor:
    """The mean over all positions, the same for each."""
    return Sums.terms(exponents, values).total().mean().expand_as(values)


def _running_means(_: slice, exponents: Tensor, values: Tensor) -> Tensor:
    """The mean over the positions up to each."""
    # Each position is a row of its own at first, so that its reference is.
    terms = Sums.terms(exponents[..., None, :], values[..., None, :])
    return terms.each(lambda x: x.squeeze(-2)).running().mean()
