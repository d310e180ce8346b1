"""AFT-local: the attention-free transformer with biases of near pairs (arXiv 2105.14103)."""

from functools import partial
from typing import Annotated, ClassVar, final

import torch
from torch import Tensor

from protlm.attention.attention_free import (
    Mixer,
    PositionBiases,
    WindowedAttentionFree,
    WindowWeights,
    block_size,
    offsets,
    rows_of_biases,
    windowed_means,
)
from protlm.attention.ops.numerics import upcast
from protlm.config.fields import at_least


@final
class AftLocal(WindowedAttentionFree):
    """A gated mean of all values by softmax(k + w) in every channel, w learned for near pairs.

    Y_i = σ(q_i) ⊙ Σ_j e^(k_j + w_ij) ⊙ v_j / Σ_j e^(k_j + w_ij), over all j or, in causal mode, j ≤
    i, where w_ij = u_i·v_j if |i - j| < s = `window`, and 0 (not -∞) elsewhere: distant positions
    count as in AFT-simple (Zhai et al., arXiv 2105.14103, section 3, "AFT-local"). s ≥ L is
    AFT-full. Heads are only groups of channels. Learned positions are recommended in addition to w;
    rotary positions are not applied. Near and far terms are summed separately, because the
    difference e^w - 1 of the shorter formula would cancel where w is very negative. In float32 a
    weight becomes 0 if w alone makes it e^69 times smaller than 1 or than the largest weight of its
    row. Decoding keeps the last s positions and the sums over all positions before them.
    """

    cost: ClassVar[str] = "L s K"
    advice: ClassVar[str] = "a cheap mixer of neighbors and composition; no content-based pairs"

    def __init__(
        self,
        *,
        max_length: int,
        window: Annotated[int, at_least(1)] = 32,
        rank: Annotated[int, at_least(1)] = 128,
    ) -> None:
        super().__init__()
        self.max_length = max_length
        self.window = self._window = min(window, max_length)
        self.biases = PositionBiases(max_length=max_length, rank=rank)

    def _mixer(self, length: int, *, causal: bool) -> Mixer:
        size = block_size(self.window, length)
        distance = offsets(size, causal=causal, device=self.biases.u.device)
        bias = self._near(self.biases.blocks(length, size, causal=causal), distance, causal=causal)
        return partial(windowed_means, WindowWeights.of(bias), causal=causal)

    def _bias(self, rows: slice, length: int, *, causal: bool) -> Tensor:
        bias_ML = rows_of_biases(rows, length, self.biases.u, self.biases.v)
        position_L = torch.arange(length, device=bias_ML.device)
        return self._near(bias_ML, position_L[rows, None] - position_L, causal=causal)[None]

    def _window_bias(self, row: int, key_M: Tensor) -> Tensor:
        return (upcast(self.biases.v[key_M]) @ upcast(self.biases.u[row]))[None]

    def _near(self, bias: Tensor, distance: Tensor, *, causal: bool) -> Tensor:
        """Returns the biases of pairs in the window, -∞ for keys that a causal row does not see."""
        bias = bias.masked_fill(distance.abs() >= self.window, 0)
        return bias.masked_fill(distance < 0, -torch.inf) if causal else bias
