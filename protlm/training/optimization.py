"""The optimizer of a network, and the sorting of parameters into its groups."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from protlm.attention import Attention
from protlm.config import Optimizer, OptimizerConfig
from protlm.system.errors import UserError
from protlm.training.lora import LowRank
from protlm.training.muon import Muon, MuonWithAdamW

# Devices on which torch updates all parameters in one kernel.
_FUSED = ("cpu", "cuda")
# The longest half-life of the second moment in steps: beta2 is below 1 in double precision.
_LONGEST = 1e12


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
        """Sorts a network's parameters."""
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
        decayed = kinds.hidden | kinds.matrices
        return adamw(decayed, kinds.rest, config)
    parts: list[Muon | torch.optim.AdamW] = []
    if kinds.hidden:
        parts.append(
            Muon(
                kinds.hidden.values(),
                lr=config.learning_rate,
                momentum=config.momentum,
                weight_decay=config.weight_decay,
            )
        )
    if kinds.matrices or kinds.rest:
        parts.append(adamw(kinds.matrices, kinds.rest, config))
    return MuonWithAdamW(parts)


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
