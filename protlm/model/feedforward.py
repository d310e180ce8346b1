"""The feed-forward sublayer: two matrices with ReLU or GELU, or three with SwiGLU."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from protlm.config import Activation
from protlm.model.linear import Linear


class FeedForward(nn.Module):
    """Down(ReLU or GELU(Up x)), or Down(SiLU(Gate x) * Up x) (SwiGLU, arXiv 2002.05202).

    Args:
        model_dim: D.
        feedforward_dim: F.
        activation: the nonlinearity.
        chunk: number of positions computed at a time, and recomputed in the backward pass, so that
            no tensor of all positions has the width F (Reformer, arXiv 2001.04451, section 3);
            None computes all positions at once and keeps their activations.
    """

    def __init__(
        self,
        *,
        model_dim: int,
        feedforward_dim: int,
        activation: Activation,
        chunk: int | None = None,
    ) -> None:
        super().__init__()
        gated = activation is Activation.swiglu
        self.activation = activation
        self.chunk = chunk
        self.up = Linear(model_dim, feedforward_dim, bias=not gated)
        self.gate = Linear(model_dim, feedforward_dim, bias=False) if gated else None
        self.down = Linear(feedforward_dim, model_dim, bias=not gated)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Returns the sublayer's output, BLD."""
        if self.chunk is None:
            return self._all_at_once(x_BLD)
        kind = x_BLD.device.type
        is_mixed, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        # With one copy of a weight for all chunks, autocast would add up their gradients in the
        # dtype of the copy. Each chunk casts for itself, and the sum has the weight's dtype.
        with torch.autocast(kind, dtype=dtype, enabled=is_mixed, cache_enabled=False):
            chunks = x_BLD.split(self.chunk, dim=1)
            return torch.cat([self._recomputed(chunk_BMD) for chunk_BMD in chunks], dim=1)

    def _recomputed(self, chunk_BMD: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self._all_at_once(chunk_BMD)
        # The sublayer draws no random numbers.
        return checkpoint(
            self._all_at_once, chunk_BMD, use_reentrant=False, preserve_rng_state=False
        )

    def _all_at_once(self, x_BLD: Tensor) -> Tensor:
        up_BLF = self.up(x_BLD)
        if self.gate is not None:
            return self.down(F.silu(self.gate(x_BLD)) * up_BLF)
        if self.activation is Activation.gelu:
            return self.down(F.gelu(up_BLF))
        return self.down(F.relu(up_BLF))
