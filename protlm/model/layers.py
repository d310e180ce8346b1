"""Layers of the network: products, output layer, convolution, skips, dropout; refused rows."""

import functools
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protlm.attention.ops.numerics import widest_dtype
from protlm.attention.ops.products import product, takes_onednn
from protlm.bounds import Bounds
from protlm.data.vocabulary import VOCABULARY

# The mean fraction of `<mask>` tokens in the training of ESM: 80 % of 15 %.
_IN_TRAINING = 0.15 * 0.8


def linear(x_BLD: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns x Wᵀ + b.

    Without gradients, and in float32 on an AMD processor, oneDNN computes it in half the time
    (docs/decisions/0006). It has no gradients, and a call costs more than torch's: the single
    positions of generation stay with torch, as does training.
    """
    is_plain = not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))
    if is_plain and takes_onednn(x_BLD) and x_BLD.dim() > 2 and x_BLD.shape[-2] > 1:
        return product(x_BLD, weight, bias)
    return F.linear(x_BLD, weight, bias)


class Linear(nn.Linear):
    """`nn.Linear` by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


# Subclasses that change the weight, as a parametrization does, inherit one of them.
_FORWARDS = (nn.Linear.forward, Linear.forward)


def is_plain(layer: nn.Module) -> bool:
    """Whether a call of a layer is only the product, unlike that of an adapter or with a hook."""
    forward = type(layer).forward in _FORWARDS and "forward" not in vars(layer)
    hooks = (
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
    )
    return forward and not (hooks or nn.modules.module._has_any_global_hook())


class HeadTransform(nn.Module):
    """Norm(GELU(W x + b)), before the output layer (BERT, arXiv 1810.04805; ESM-2)."""

    def __init__(self, *, model_dim: int, norm: nn.Module) -> None:
        super().__init__()
        self.dense = Linear(model_dim, model_dim)
        self.norm = norm

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.norm(F.gelu(self.dense(x_BLD)))


@final
class TiedHead(nn.Module):
    """An output layer that is the token embedding, with a bias (arXiv 1608.05859)."""

    def __init__(self, *, vocab_size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, x_BLD: Tensor, embedding_VD: Tensor) -> Tensor:
        return linear(x_BLD, embedding_VD, self.bias)


class ShortConvolution(nn.Module):
    """Computes x_t + Σ_j w_j ⊙ x_{t+j} over the positions around t, or up to t if causal.

    Primer (So et al., arXiv 2109.08668, section 4.2) applies one after each of the projections to
    queries, keys and values. Here it is applied once, before all three. The weights start at 0,
    where the layer is the identity.
    """

    def __init__(self, *, model_dim: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.zeros(model_dim, width))

    def forward(
        self, x_BLD: Tensor, mask_BL: Tensor, *, causal: bool, bounds: Bounds | None = None
    ) -> Tensor:
        """Returns BLD; padded positions count as zeros, and are zeros in the output."""
        x_BLD = x_BLD.masked_fill(~mask_BL[..., None], 0)
        before, gap = self.width - 1 if causal else self.width // 2, self.width - 1
        if bounds is None:
            out_BLD = self._convolved(F.pad(x_BLD, (0, 0, before, gap - before)))
        else:
            place_L, (spread,) = bounds.with_gaps([x_BLD], gap)
            out_BLD = self._convolved(spread).index_select(1, place_L - before)
        return (x_BLD + out_BLD).masked_fill(~mask_BL[..., None], 0)

    def step(self, recent_BMD: Tensor | None, x_B1D: Tensor) -> tuple[Tensor, Tensor]:
        """Processes the next causal position; `recent_BMD` has the width - 1 inputs before it.

        Returns those before the following position, and the output, B1D.
        """
        if recent_BMD is None:
            recent_BMD = x_B1D.new_zeros(x_B1D.shape[0], self.width - 1, x_B1D.shape[2])
        window = torch.cat([recent_BMD, x_B1D], dim=1)
        return window[:, 1:], x_B1D + self._convolved(window)

    def _convolved(self, padded: Tensor) -> Tensor:
        """Convolves the positions that have all their neighbors, as an image of one row."""
        if torch.compiler.is_compiling():
            # Shifted products are fused: the library transforms the layout twice, and takes longer.
            length = padded.shape[1] - self.width + 1
            shifted = (padded[:, j : j + length] * self.weight[:, j] for j in range(self.width))
            return functools.reduce(torch.add, shifted).to(padded.dtype)
        # One group per channel; channels are last in memory, as in the input.
        weight = self.weight.to(padded.dtype)[:, None, None]
        return F.conv2d(padded.mT.unsqueeze(2), weight, groups=weight.shape[0]).squeeze(2).mT


class UnetSkips(nn.Module):
    """Adds to the input of block N-1-n, for n < N/2, a learned multiple of the input of block n.

    U-ViT (Bao et al., arXiv 2209.12152, section 3.1) concatenates them. Here they are added with
    learned factors, as in the NanoGPT speed runs. The factors start at 0. The middle block of an
    odd number of blocks has no skip.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.num_layers = num_layers
        self.factors = nn.Parameter(torch.zeros(num_layers // 2))

    def forward(self, residual_BLD: Tensor, early: list[Tensor]) -> Tensor:
        """Returns the input of the next block, and appends it to `early`."""
        partner = self.num_layers - 1 - len(early)
        if partner < len(early):
            residual_BLD = residual_BLD + self.factors[partner] * early[partner]
        early.append(residual_BLD)
        return residual_BLD


def drop_masked_tokens(
    x_BLD: Tensor, tokens_BL: Tensor, mask_BL: Tensor, bounds: Bounds | None = None
) -> Tensor:
    """Sets the embeddings of `<mask>` to 0, and scales a row by 0.88 / (1 - its fraction of it).

    Token dropout of ESM: Rives et al. (doi:10.1073/pnas.2016239118) describe the masking; the scale
    is that of ESM-1b and ESM-2, which also have it at inference. Padding is not counted. A packed
    protein is scaled by its own fraction.
    """
    is_dropped_BL = (tokens_BL == VOCABULARY.mask) & mask_BL
    counts_2BL = torch.stack([mask_BL, mask_BL & ~is_dropped_BL]).to(widest_dtype(mask_BL.device))
    if bounds is None:
        num_tokens, num_left = counts_2BL.sum(2, keepdim=True)
    else:
        of_segments = counts_2BL.new_zeros(2, 1, len(bounds.cu_seqlens))
        of_segments = of_segments.index_add(2, bounds.segment_L, counts_2BL)
        num_tokens, num_left = of_segments.index_select(2, bounds.segment_L)
    # A row of nothing but `<mask>` has no embedding to scale.
    scale = ((1 - _IN_TRAINING) * num_tokens / num_left.clamp(min=1)).to(x_BLD.dtype)
    return x_BLD.masked_fill(is_dropped_BL[..., None], 0) * scale[..., None]


def only(rows_B: Tensor, x: Tensor) -> Tensor:
    """Returns a tensor with NaN in all other rows, which a graph cannot refuse.

    A number is NaN if there are any.
    """
    kept = rows_B.view(-1, *[1] * (x.dim() - 1)) if x.dim() else rows_B.all()
    return torch.where(kept, x, torch.nan)


def padded_at_the_end(mask_BL: Tensor) -> Tensor:
    """Returns which rows of a mask have no padding before a position that is attended to."""
    position_L = torch.arange(mask_BL.shape[1], device=mask_BL.device)
    return (mask_BL == (position_L < mask_BL.sum(1, keepdim=True))).all(1)
