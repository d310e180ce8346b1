"""U-net skips: the inputs of early blocks are added to those of late blocks.

U-ViT (Bao et al., arXiv 2209.12152, section 3.1) concatenates them. Here they are added with
learned factors, as in the NanoGPT speed runs.
"""

import torch
from torch import Tensor, nn


class UnetSkips(nn.Module):
    """Adds to the input of block N-1-n, for n < N/2, a learned multiple of the input of block n.

    The factors start at 0. The middle block of an odd number of blocks has no skip.

    Args:
        num_layers: N.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.num_layers = num_layers
        self.factors = nn.Parameter(torch.zeros(num_layers // 2))

    def forward(self, residual_BLD: Tensor, early: list[Tensor]) -> Tensor:
        """Returns the input of the next block, and appends it to `early`.

        Args:
            residual_BLD: the input of the next block without skips.
            early: the inputs of the previous blocks.
        """
        partner = self.num_layers - 1 - len(early)
        if partner < len(early):
            residual_BLD = residual_BLD + self.factors[partner] * early[partner]
        early.append(residual_BLD)
        return residual_BLD
