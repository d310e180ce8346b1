"""AFT-conv: the attention-free transformer with a convolution (arXiv 2105.14103)."""

import math
from functools import partial
from typing import Annotated, ClassVar, final

import torch
from torch import Tensor, nn

from protlm.attention.attention_free import (
    Mixer,
    WindowedAttentionFree,
    WindowWeights,
    block_size,
    offsets,
    windowed_means,
)
from protlm.attention.base import odd
from protlm.attention.ops.numerics import upcast


@final
class AftConv(WindowedAttentionFree):
    """A gated mean of all values by softmax(x + w) in every head, w learned for each distance.

    With one exponent for a head and a position, x_j = Σ_c k_jc / √K,

        Y_i = σ(q_i) ⊙ Σ_j e^(x_j + w_(i-j)) v_j / Σ_j e^(x_j + w_(i-j)),

    over all j or, in causal mode, j ≤ i. w has s = `kernel_size` values for each head and is 0
    beyond (Zhai et al., arXiv 2105.14103, section 3, "AFT-conv"; the paper writes it as
    convolutions of e^x v and of e^x with e^w - 1, added to the sums of both). A kernel covers
    i - (s-1)/2 to i + (s-1)/2 or, in causal mode, i - s + 1 to i, and its values are in this order.
    w = γ (z - mean z) / std z + β for each head, where γ = β = 0 initially: this is AFT-simple with
    one exponent for a head.

    The paper projects the input to one number for each head. The sum over a key's channels is the
    same class of functions, and leaves no parameter of the model unused. Near and far terms are
    summed separately, because e^w - 1 would cancel where w is very negative. In float32 a weight
    becomes 0 if w alone makes it e^69 times smaller than 1 or than the largest weight of its row.
    Distances replace positions, and rotary positions are not applied. Decoding keeps the last s
    positions and the sums over all positions before them.
    """

    map_meaning: ClassVar[str] = "the weight of value j in output i before the gate"
    cost: ClassVar[str] = "L s K"
    advice: ClassVar[str] = "motifs: a convolution over residues plus the composition; any length"

    def __init__(self, *, num_heads: int, kernel_size: Annotated[int, odd(3)] = 11) -> None:
        super().__init__()
        self.kernel_size = self._window = kernel_size
        self.kernel = nn.Parameter(torch.randn(num_heads, kernel_size))
        # One-dimensional, because weight decay acts on matrices.
        self.gain = nn.Parameter(torch.zeros(num_heads))
        self.shift = nn.Parameter(torch.zeros(num_heads))

    def _exponents(self, keys: Tensor) -> Tensor:
        return keys.sum(dim=-1, keepdim=True) / math.sqrt(keys.shape[-1])

    def _mixer(self, length: int, *, causal: bool) -> Mixer:
        size = block_size(self.kernel_size, length)
        distance = offsets(size, causal=causal, device=self.kernel.device)
        bias = self._near(distance, causal=causal)[:, None]
        return partial(windowed_means, WindowWeights.of(bias), causal=causal)

    def _bias(self, rows: slice, length: int, *, causal: bool) -> Tensor:
        position_L = torch.arange(length, device=self.kernel.device)
        return self._near(position_L[rows, None] - position_L, causal=causal)

    def _window_bias(self, row: int, key_M: Tensor) -> Tensor:
        return self._near(row - key_M, causal=True)

    def _near(self, distance: Tensor, *, causal: bool) -> Tensor:
        """Returns w of i - j for every head, -∞ for keys that a causal row does not see."""
        last = self.kernel_size - 1
        place = (last if causal else last // 2) - distance
        bias = self._weights()[:, place.clamp(0, last)].masked_fill((place < 0) | (place > last), 0)
        return bias.masked_fill(distance < 0, -torch.inf) if causal else bias

    def _weights(self) -> Tensor:
        """Computes w of every head, in the order of a convolution's kernel."""
        kernel = upcast(self.kernel)
        spread, mean = torch.std_mean(kernel, dim=1, correction=0, keepdim=True)
        gain, shift = upcast(self.gain)[:, None], upcast(self.shift)[:, None]
        return gain * (kernel - mean) / spread + shift
