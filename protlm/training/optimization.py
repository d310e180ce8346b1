"""The optimizer of a network, with its groups of parameters."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from protlm.attention import Attention
from protlm.config import Optimizer, OptimizerConfig
from protlm.system.errors import UserError
from protlm.training.lora import LowRank

# Devices on which torch updates all parameters in one kernel.
_FUSED = ("cpu", "cuda")
# The longest half-life of the second moment in steps: beta2 is below 1 in double precision.
_LONGEST = 1e12


def orthogonalized(matrices: Tensor) -> Tensor:
    """Returns approximately the nearest semi-orthogonal matrix, U Vᵀ of the SVD, of each.

    Computes five Newton-Schulz iterations X ← aX + b(XXᵀ)X + c(XXᵀ)²X, in bfloat16 on a GPU.
    """
    # Chosen for a large slope at 0. Singular values end within about a third of 1
    # (https://kellerjordan.github.io/posts/muon/).
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    # By a power of 2, which rounds nothing: the squares of small numbers would vanish.
    largest = torch.linalg.vector_norm(x, math.inf, (1, 2), keepdim=True, dtype=torch.float32)
    x = x.ldexp(-largest.frexp().exponent.clamp(-100, 100))
    # The norm is at least a half, unless all numbers are 0 (or below 2^-100).
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=0.5)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


@final
class Muon(torch.optim.Optimizer):
    """Updates matrices by their orthogonalized Nesterov momentum (Jordan et al. 2024).

    An update has the root mean square 0.2, like one of AdamW: W ← W - η(0.2 √max(m, n) O + λW)
    (arXiv 2502.16982, equation 4). torch.optim.Muon computes the same one matrix after the other,
    in bfloat16 also on a CPU: 1,290 kernels for a step of `model=medium_8` instead of 283.
    """

    def __init__(self, params: ParamsT, *, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        assert all(p.ndim == 2 for group in self.param_groups for p in group["params"])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates all matrices that have a gradient; those of one shape in few kernels."""
        for group in self.param_groups:
            alike: dict[Any, list[Tensor]] = {}
            for weight in group["params"]:
                if weight.grad is not None:
                    alike.setdefault((weight.shape, weight.dtype, weight.device), []).append(weight)
            for weights in alike.values():
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


@final
class MuonWithAdamW(torch.optim.Optimizer):
    """Runs optimizers as one, with their groups, states and state dict joined.

    Lightning's automatic optimization supports a single optimizer.
    """

    def __init__(self, optimizers: Sequence[Muon | torch.optim.AdamW]) -> None:
        self._optimizers = optimizers
        super().__init__([group for one in optimizers for group in one.param_groups], {})
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for one in self._optimizers:
            one.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        start = 0
        for one in self._optimizers:
            end = start + len(one.param_groups)
            one.param_groups, one.state = self.param_groups[start:end], self.state
            start = end


@dataclass(frozen=True)
class ParameterKinds:
    """The trained parameters of a network by name, sorted by how they are optimized.

    Attributes:
        hidden: matrices from hidden state to hidden state, inside the blocks.
        matrices: other matrices that multiply activations: the output layer, stacks of matrices.
        rest: embeddings, learned positions, norms, biases, gates, scales and other tables. They
            do not multiply activations as matrices do. Weight decay would pull them toward a
            meaningful value, and would shrink rows that a batch does not use.
    """

    hidden: dict[str, nn.Parameter]
    matrices: dict[str, nn.Parameter]
    rest: dict[str, nn.Parameter]

    @classmethod
    def of(cls, network: nn.Module) -> "ParameterKinds":
        kinds = cls({}, {}, {})
        products = _products(network)
        for name, parameter in network.named_parameters():
            if not parameter.requires_grad:
                continue
            if name not in products:
                kinds.rest[name] = parameter
            elif name.startswith("blocks.") and parameter.ndim == 2:
                kinds.hidden[name] = parameter
            else:
                kinds.matrices[name] = parameter
        return kinds


def _products(network: nn.Module) -> set[str]:
    """Returns the names of parameters that multiply activations as matrices."""
    names = set()
    for prefix, module in network.named_modules():
        if isinstance(module, nn.Linear):
            names.add(f"{prefix}.weight")
        elif isinstance(module, LowRank):
            names |= {f"{prefix}.A", f"{prefix}.B"}
        elif isinstance(module, Attention):
            names |= {f"{prefix}.{name}" for name in module.matrices}
    return names


def with_half_life(config: OptimizerConfig, *, tokens_per_step: int) -> OptimizerConfig:
    """Computes beta2 from its half-life, if set: 0.5 = beta2^(half-life / tokens per step).

    >>> config = OptimizerConfig(learning_rate=1e-3, beta2_half_life=2e6)
    >>> with_half_life(config, tokens_per_step=10**6).beta2
    0.7071067811865476
    """
    if config.beta2_half_life is None:
        return config
    if not tokens_per_step <= config.beta2_half_life <= _LONGEST * tokens_per_step:
        raise UserError(
            f"optimizer.beta2_half_life={config.beta2_half_life:g} tokens must be at least a step, "
            f"{tokens_per_step}, and at most {_LONGEST:g} steps"
        )
    return replace(config, beta2=0.5 ** (tokens_per_step / config.beta2_half_life))


def build_optimizer(network: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Returns the optimizer of a network; weight decay applies to matrices only."""
    kinds = ParameterKinds.of(network)
    if config.name is Optimizer.adamw:
        return adamw(kinds.hidden | kinds.matrices, kinds.rest, config)
    optimizers: list[Muon | torch.optim.AdamW] = []
    if kinds.hidden:
        optimizers.append(
            Muon(
                kinds.hidden.values(),
                lr=config.learning_rate,
                momentum=config.momentum,
                weight_decay=config.weight_decay,
            )
        )
    if kinds.matrices or kinds.rest:
        optimizers.append(adamw(kinds.matrices, kinds.rest, config))
    return MuonWithAdamW(optimizers)


def adamw(
    decayed: dict[str, nn.Parameter], rest: dict[str, nn.Parameter], config: OptimizerConfig
) -> torch.optim.AdamW:
    """Returns AdamW (arXiv 1711.05101), fused where torch supports it."""
    groups = [
        {"params": list(decayed.values()), "weight_decay": config.weight_decay},
        {"params": list(rest.values()), "weight_decay": 0.0},
    ]
    devices = {p.device.type for group in groups for p in group["params"]}
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=devices <= set(_FUSED),
    )
