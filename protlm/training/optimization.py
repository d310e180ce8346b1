"""The optimiser of a network: which parameters decay, and which are Muon's."""

from dataclasses import dataclass

import torch
from torch import nn

from protlm.attention import Attention
from protlm.config import Optimizer, OptimizerConfig
from protlm.training.muon import Muon, MuonWithAdamW

# Where torch updates all parameters in one kernel.
_FUSED = ("cpu", "cuda")


@dataclass(frozen=True)
class ParameterKinds:
    """The trained parameters of a network, by name, as optimisers tell them apart.

    Attributes:
        hidden: matrices from hidden state to hidden state, inside the blocks.
        matrices: other matrices that multiply activations: the output layer, stacks of matrices.
        rest: embeddings, learned positions, norms, biases, gates, scales and other tables. They
            are no matrices of a product: weight decay would pull them to a value that means
            something, and rows that a batch does not use with the others.
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
    """Names of the parameters that activations are multiplied with, as matrices."""
    names = set()
    for prefix, module in network.named_modules():
        if isinstance(module, nn.Linear):
            names.add(f"{prefix}.weight")
        elif isinstance(module, Attention):
            names |= {f"{prefix}.{name}" for name in module.matrices}
    return names


def build_optimizer(network: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimiser of a network; weight decay acts on matrices alone."""
    kinds = ParameterKinds.of(network)
    if config.name is Optimizer.adamw:
        decayed = kinds.hidden | kinds.matrices
        return adamw(decayed, kinds.rest, config)
    muon = Muon(
        kinds.hidden.values(),
        lr=config.learning_rate,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )
    return MuonWithAdamW(muon, adamw(kinds.matrices, kinds.rest, config))


def adamw(
    decayed: dict[str, nn.Parameter], rest: dict[str, nn.Parameter], config: OptimizerConfig
) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101), in one kernel where torch has it."""
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
