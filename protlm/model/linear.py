"""Linear layers, by the fastest library at hand where no gradient is needed."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protlm.attention.ops.products import product, takes_onednn


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
        """Returns x Wᵀ + b, BLD."""
        return linear(input, self.weight, self.bias)


# Subclasses that change the weight, as a parametrization does, inherit one of them.
_FORWARDS = (nn.Linear.forward, Linear.forward)


def is_plain(layer: nn.Module) -> bool:
    """Whether a call of a layer is only the product, unlike that of an adapter or with a hook."""
    forward = type(layer).forward in _FORWARDS and "forward" not in vars(layer)
    hooks = layer._forward_hooks or layer._forward_pre_hooks
    hooks = hooks or layer._backward_hooks or layer._backward_pre_hooks
    return forward and not (hooks or nn.modules.module._has_any_global_hook())
