"""Muon for the matrices of the blocks and AdamW for the rest, as one optimizer."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import ParamsT

# Coefficients of the quintic iteration, chosen for a large slope at 0. Singular values end within
# about a third of 1 (https://kellerjordan.github.io/posts/muon/).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


def orthogonalized(matrices: Tensor) -> Tensor:
    """Returns approximately the nearest semi-orthogonal matrices, U Vᵀ of the SVD of each.

    Computes five Newton-Schulz iterations X ← aX + b(XXᵀ)X + c(XXᵀ)²X, in bfloat16 on a GPU.

    Args:
        matrices: any number of matrices of one shape, in a tensor with three axes.
    """
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


@final
class Muon(Optimizer):
    """Updates matrices by their orthogonalized Nesterov momentum (Jordan et al. 2024).

    An update has the root mean square 0.2, like one of AdamW: W ← W - η(0.2 √max(m, n) O + λW)
    (arXiv 2502.16982, equation 4). torch.optim.Muon computes the same one matrix after the other,
    in bfloat16 also on a CPU: 1,290 kernels for a step of `model=medium_8` instead of 283.

    Args:
        params: matrices, or groups of them.
        lr: the learning rate η.
        momentum: decay of the average of gradients.
        weight_decay: λ.
    """

    def __init__(self, params: ParamsT, *, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        assert all(p.ndim == 2 for group in self.param_groups for p in group["params"])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates all matrices that have a gradient; those of one shape in few kernels."""
        for group in self.param_groups:
            for weights in _alike(
                [weight for weight in group["params"] if weight.grad is not None]
            ):
                momenta = [self._momentum(weight, group["momentum"]) for weight in weights]
                size = 0.2 * max(weights[0].shape) ** 0.5
                updates = orthogonalized(torch.stack(momenta))
                for weight, update in zip(weights, updates, strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(update.to(weight.dtype), alpha=-group["lr"] * size)

    def _momentum(self, weight: Tensor, momentum: float) -> Tensor:
        """Adds the gradient to its average; returns Nesterov's momentum."""
        gradient, state = weight.grad, self.state[weight]
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(average, momentum)


def _alike(weights: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    """Groups matrices that can be stacked."""
    groups: dict[Any, list[Tensor]] = {}
    for weight in weights:
        groups.setdefault((weight.shape, weight.dtype, weight.device), []).append(weight)
    return groups.values()


@final
class MuonWithAdamW(Optimizer):
    """Runs optimizers as one, with their groups, states and state dict joined.

    Lightning's automatic optimization supports a single optimizer.

    Args:
        parts: Muon for the hidden matrices and AdamW for all other parameters, or the one of them
            that has parameters.
    """

    def __init__(self, parts: Sequence[Muon | AdamW]) -> None:
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Makes all parts use the groups and the state of this one."""
        start = 0
        for part in self._parts:
            end = start + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[start:end], self.state
            start = end
