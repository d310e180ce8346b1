"""Nyströmformer: softmax attention through landmarks (Xiong et al., arXiv 2102.03902)."""

from typing import Annotated, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protlm.attention.base import Attention, Context, odd
from protlm.attention.ops.blocks import from_blocks
from protlm.attention.ops.numerics import (
    no_autocast,
    padding_bias,
    upcast,
    visible_softmax,
    widest_dtype,
    zero_padding,
)
from protlm.config.fields import at_least

# Output positions that the convolution computes together.
_BLOCK = 64


@final
class Nystromformer(Attention):
    """Softmax attention approximated from P landmarks, means of segments of the sequence.

    O = softmax(q k̃ᵀ / √K) Z softmax(q̃ kᵀ / √K) v + conv(v) (section 3). The landmarks q̃ and k̃
    are means of queries and keys over P = `num_landmarks` segments of consecutive positions, and Z
    is the iterated pseudo-inverse of A = softmax(q̃ k̃ᵀ / √K): see `pseudo_inverse`. The skip is a
    depthwise convolution along the sequence, one kernel of `conv_kernel` positions for all channels
    of a head, as in the released code. Means mix the past with the future, so there is no causal
    form.

    With rotary positions it is rotated queries and keys that are averaged: the rotation comes
    before the landmarks. A landmark of a long segment then keeps only the channels of low
    frequency, and the others average out.

    Segments divide a sample's n true positions: the r-th (from 0) is in segment ⌊r P / n⌋. This is
    the paper's rule where n is a multiple of P; otherwise the paper pads the sequence, which would
    include padding in the means. With n < P every position is its own landmark, and the others do
    not exist. The convolution runs over the positions of the tensor, with 0 at padding. All
    computations are in float32 or better, those of A and Z in float64, because Z magnifies errors;
    on a device without float64 in float32. A row's weights may be negative, and sum to 1 only
    without the skip and as far as Z has converged.
    """

    supports_causal = False
    cost: ClassVar[str] = "L P K + P³"
    advice: ClassVar[str] = "long proteins, softmax-like weights that vary smoothly along the chain"
    map_meaning: ClassVar[str] = (
        "the weight of value j in output i, the skip included; may be negative"
    )

    def __init__(
        self,
        *,
        num_heads: int,
        num_landmarks: Annotated[int, at_least(1)] = 64,
        num_iterations: Annotated[int, at_least(1)] = 6,
        conv_kernel: Annotated[int | None, odd(1)] = 35,
    ) -> None:
        super().__init__()
        self.num_landmarks = num_landmarks
        self.num_iterations = num_iterations
        self.conv_weight: nn.Parameter | None = None
        if conv_kernel is not None:
            # The initialization of torch's convolutions: uniform in ±1 / √fan_in.
            uniform = 2 * torch.rand(num_heads, conv_kernel) - 1
            self.conv_weight = nn.Parameter(uniform / conv_kernel**0.5)

    def mix(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, context: Context) -> Tensor:
        mask_BL = context.mask_BL
        with no_autocast(v_BHLC):
            q, k, v = (upcast(zero_padding(x, mask_BL)) for x in (q_BHLK, k_BHLK, v_BHLC))
            out_BHLC = self._through_landmarks(q, k, v, mask_BL)
            if self.conv_weight is not None:
                out_BHLC = out_BHLC + convolved(v, self.conv_weight)
        return zero_padding(out_BHLC.to(v_BHLC.dtype), mask_BL)

    def _through_landmarks(
        self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, mask_BL: Tensor
    ) -> Tensor:
        is_in_BPL = landmark_members(mask_BL, self.num_landmarks)
        exists_BP = is_in_BPL.any(dim=-1)
        q_BHPK, k_BHPK = landmark_means(q_BHLK, is_in_BPL), landmark_means(k_BHLK, is_in_BPL)
        inverse_BHPP = pseudo_inverse(_kernel(q_BHPK, k_BHPK, exists_BP), self.num_iterations)
        mixed_BHPC = _attend(q_BHPK, k_BHLK, v_BHLC, mask_BL)
        values_BHPC = (inverse_BHPP @ mixed_BHPC.to(inverse_BHPP.dtype)).to(v_BHLC.dtype)
        return _attend(q_BHLK, k_BHPK, values_BHPC, exists_BP)


def landmark_members(mask_BL: Tensor, num_landmarks: int) -> Tensor:
    """Assigns positions to segments, BPL: none at padding.

    The r-th of a sample's n true positions is in segment ⌊r P / n⌋, or r where n < P.
    """
    rank_BL = mask_BL.cumsum(dim=1) - 1
    # Integer division: with floats some positions would be one segment too low.
    length_B1 = mask_BL.sum(dim=1, keepdim=True).clamp(min=num_landmarks)
    landmark_BL = rank_BL * num_landmarks // length_B1
    number_P1 = torch.arange(num_landmarks, device=mask_BL.device)[:, None]
    return (landmark_BL[:, None] == number_P1) & mask_BL[:, None]


def landmark_means(x_BHLK: Tensor, is_in_BPL: Tensor) -> Tensor:
    """Computes the means over the positions of every segment, BHPK; 0 for an empty segment."""
    # Unlike index_add, a matrix product is deterministic on a GPU.
    sums_BHPK = torch.einsum("bpl,bhlk->bhpk", is_in_BPL.to(x_BHLK.dtype), x_BHLK)
    return sums_BHPK / is_in_BPL.sum(dim=-1).clamp(min=1)[:, None, :, None]


def pseudo_inverse(a_BHPP: Tensor, num_iterations: int) -> Tensor:
    """Iterates towards the Moore-Penrose inverse of matrices whose rows sum to 1 or are all 0.

    Z₀ = Aᵀ / (|A|₁ |A|_∞), Z ← ¼ Z (13 - A Z (15 - A Z (7 - A Z))), which is of order 3 (section 3,
    after Razavi et al. 2014). Z₀ is computed for every matrix separately, so that samples are
    independent of each other.
    """
    # Rows sum to 1, so |A|_∞ is 1; |A|₁ is 0 where the sample has no landmarks.
    norm_BH11 = a_BHPP.sum(dim=-2, keepdim=True).amax(dim=-1, keepdim=True)
    z_BHPP = a_BHPP.mT / norm_BH11.masked_fill(norm_BH11 == 0, 1)
    identity = torch.eye(a_BHPP.shape[-1], dtype=a_BHPP.dtype, device=a_BHPP.device)
    for _ in range(num_iterations):
        az_BHPP = a_BHPP @ z_BHPP
        inner_BHPP = 15 * identity - az_BHPP @ (7 * identity - az_BHPP)
        z_BHPP = z_BHPP @ (13 * identity - az_BHPP @ inner_BHPP) / 4
    return z_BHPP


def convolved(v_BHLC: Tensor, weight: Tensor) -> Tensor:
    """Convolves every channel of a head along the sequence with the head's kernel, (H, width).

    It multiplies banded matrices, a block of positions at a time. On a CPU this is about twice as
    fast as torch's convolution, whose gradient of a kernel of more than 33 positions is wrong there
    (by 4 to 15 % with several heads; oneDNN in torch 2.13).
    """
    length, width = v_BHLC.shape[2], weight.shape[1]
    window = _BLOCK + width - 1
    padding = (0, 0, width // 2, width // 2 + -length % _BLOCK)
    windows = F.pad(v_BHLC, padding).unfold(2, window, _BLOCK)
    # Row i of a band contains the kernel from column i on.
    rows = F.pad(weight.to(v_BHLC.dtype), (_BLOCK - 1, _BLOCK - 1)).unfold(1, window, 1)
    return from_blocks(torch.einsum("hmx,bhscx->bhsmc", rows.flip(1), windows), length)


def _kernel(q_BHPK: Tensor, k_BHPK: Tensor, exists_BP: Tensor) -> Tensor:
    """Computes softmax(q̃ k̃ᵀ / √K), BHPP in the widest dtype; 0 without landmarks."""
    q_BHPK, k_BHPK = (x.to(widest_dtype(x.device)) for x in (q_BHPK, k_BHPK))
    logits_BHPP = q_BHPK @ k_BHPK.mT / q_BHPK.shape[-1] ** 0.5
    return visible_softmax(logits_BHPP, exists_BP[:, None, :, None] & exists_BP[:, None, None])


def _attend(q_BHLK: Tensor, k_BHMK: Tensor, v_BHMC: Tensor, visible_BM: Tensor) -> Tensor:
    """Computes softmax(q kᵀ / √K) v over the visible keys by torch's fused kernels."""
    return F.scaled_dot_product_attention(
        q_BHLK, k_BHMK, v_BHMC, attn_mask=padding_bias(visible_BM, q_BHLK.dtype)[:, None, None]
    )
