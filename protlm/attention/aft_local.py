"""AFT-local: the attention-free transformer with biases of near pairs (arXiv 2105.14103)."""

from functools import partial
from typing import ClassVar, final

import torch
from torch import Tensor

from protlm.attention.aft.base import AttentionFree, Mixer
from protlm.attention.aft.positions import PositionBiases
from protlm.attention.aft.windows import WindowWeights, block_size, offsets, windowed_means
from protlm.errors import UserError


@final
class AftLocal(AttentionFree):
    """A gated mean of all values by softmax(k + w) in every channel, w learned for near pairs.

    Y_i = σ(q_i) ⊙ Σ_j e^(k_j + w_ij) ⊙ v_j / Σ_j e^(k_j + w_ij), over all j or, causal, j ≤ i, with
    w_ij = u_i·v_j where |i - j| < s, and 0 (not -∞) elsewhere: what is far counts as in AFT-simple.
    Zhai et al., arXiv 2105.14103, section 3, "AFT-local". s ≥ L is AFT-full. Heads only hold
    channels. Beside w, learned positions suit it: rotary ones are harmless, but weigh a value by
    its own position only. Near and far are summed apart: the difference e^w - 1 of the short
    formula would cancel where w is very negative. In float32 a weight vanishes that w alone makes
    e^69 times smaller than the largest of its row, or than 1.

    Args:
        max_length: positions that u and v have rows for; longer inputs are refused.
        window: s; i and j are near if they are less than s positions apart.
        rank: width d' of u and v; the paper has 64 to 256.

    Raises:
        UserError: a window or a rank below 1.
    """

    cost: ClassVar[str] = "L s K"
    advice: ClassVar[str] = "a cheap mixer of neighbours and composition; no content-based pairs"

    def __init__(self, *, max_length: int, window: int = 32, rank: int = 128) -> None:
        super().__init__()
        if window < 1:
            raise UserError(
                f"attention.window={window} must be at least 1; type attention.window=32, or "
                "attention=aft_simple for no window"
            )
        self.max_length = max_length
        self.window = window
        self.biases = PositionBiases(max_length=max_length, rank=rank)

    def _mixer(self, length: int, *, causal: bool) -> Mixer:
        size = block_size(self.window, length)
        distance = offsets(size, causal=causal, device=self.biases.u.device)
        bias = self._near(self.biases.blocks(length, size, causal=causal), distance, causal=causal)
        return partial(windowed_means, WindowWeights.of(bias), causal=causal)

    def _bias(self, rows: slice, length: int, *, causal: bool) -> Tensor:
        bias_ML = self.biases.rows(rows, length)
        position_L = torch.arange(length, device=bias_ML.device)
        return self._near(bias_ML, position_L[rows, None] - position_L, causal=causal)[None]

    def _near(self, bias: Tensor, distance: Tensor, *, causal: bool) -> Tensor:
        """The biases of pairs in the window; a key that a causal row does not see has -∞."""
        bias = bias.masked_fill(distance.abs() >= self.window, 0)
        return bias.masked_fill(distance < 0, -torch.inf) if causal else bias
