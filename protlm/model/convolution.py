"""A short depthwise convolution over neighboring positions of the sequence.

Primer (So et al., arXiv 2109.08668, section 4.2) applies one after each of the projections to
queries, keys and values. Here it is applied once, before all three.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ShortConvolution(nn.Module):
    """Computes x_t + Σ_j w_j ⊙ x_{t+j} over the positions around t, or up to t if causal.

    The weights start at 0, where the layer is the identity.

    Args:
        model_dim: D.
        width: number of positions, odd.
    """

    def __init__(self, *, model_dim: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.zeros(model_dim, width))

    def forward(self, x_BLD: Tensor, mask_BL: Tensor, *, causal: bool) -> Tensor:
        """Returns BLD; padded positions count as zeros, and are zeros in the output."""
        x_BLD = x_BLD.masked_fill(~mask_BL[..., None], 0)
        before = self.width - 1 if causal else self.width // 2
        padded = F.pad(x_BLD, (0, 0, before, self.width - 1 - before))
        return (x_BLD + self._convolved(padded)).masked_fill(~mask_BL[..., None], 0)

    def step(self, recent_BMD: Tensor | None, x_B1D: Tensor) -> tuple[Tensor, Tensor]:
        """Processes the next position in causal mode.

        Args:
            recent_BMD: the inputs of the previous width - 1 positions, or None at the first.
            x_B1D: the input of this one.

        Returns:
            The inputs of the last width - 1 positions, and the output, B1D.
        """
        if recent_BMD is None:
            recent_BMD = x_B1D.new_zeros(x_B1D.shape[0], self.width - 1, x_B1D.shape[2])
        window = torch.cat([recent_BMD, x_B1D], dim=1)
        return window[:, 1:], x_B1D + self._convolved(window)

    def _convolved(self, padded: Tensor) -> Tensor:
        """Convolves the positions that have all their neighbors, as an image of one row."""
        # One group per channel; channels are last in memory, as in the input.
        weight = self.weight.to(padded.dtype)[:, None, None]
        picture = padded.mT.unsqueeze(2)
        return F.conv2d(picture, weight, groups=weight.shape[0]).squeeze(2).mT
