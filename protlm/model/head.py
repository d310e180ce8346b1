"""The output layer: from the last hidden state to logits.

A linear layer, alone or after a dense layer, GELU and a norm (BERT, arXiv 1810.04805; ESM-2). Its
weights may be those of the token embedding (arXiv 1608.05859), with a separate bias.
"""

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protlm.model.linear import Linear, linear


class HeadTransform(nn.Module):
    """Norm(GELU(W x + b)), before the output layer.

    Args:
        model_dim: D.
        norm: the norm of the output.
    """

    def __init__(self, *, model_dim: int, norm: nn.Module) -> None:
        super().__init__()
        self.dense = Linear(model_dim, model_dim)
        self.norm = norm

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Returns BLD."""
        return self.norm(F.gelu(self.dense(x_BLD)))


@final
class TiedHead(nn.Module):
    """An output layer whose matrix is the token embedding; only the bias is a parameter.

    Args:
        vocab_size: V.
    """

    def __init__(self, *, vocab_size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, x_BLD: Tensor, embedding_VD: Tensor) -> Tensor:
        """Returns logits, BLV."""
        return linear(x_BLD, embedding_VD, self.bias)
