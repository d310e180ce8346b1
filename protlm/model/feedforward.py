"""The feed-forward sublayer: two matrices with ReLU or GELU, or three with SwiGLU."""

import torch.nn.functional as F
from torch import Tensor, nn

from protlm.config import Activation


class FeedForward(nn.Module):
    """Down(ReLU or GELU(Up x)), or Down(SiLU(Gate x) * Up x) (SwiGLU, arXiv 2002.05202)."""

    def __init__(self, *, model_dim: int, feedforward_dim: int, activation: Activation) -> None:
        super().__init__()
        gated = activation is Activation.swiglu
        self.activation = activation
        self.up = nn.Linear(model_dim, feedforward_dim, bias=not gated)
        self.gate = nn.Linear(model_dim, feedforward_dim, bias=False) if gated else None
        self.down = nn.Linear(feedforward_dim, model_dim, bias=not gated)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Returns the sublayer's output, BLD."""
        up_BLF = self.up(x_BLD)
        if self.gate is not None:
            return self.down(F.silu(self.gate(x_BLD)) * up_BLF)
        if self.activation is Activation.gelu:
            return self.down(F.gelu(up_BLF))
        return self.down(F.relu(up_BLF))
