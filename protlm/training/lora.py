"""LoRA adapters in the linear layers of a network.

Hu et al. 2021 (arXiv:2106.09685), equation 3: a weight W becomes W + (α / r) B A. The adapter is a
parametrization of the weight, because self-attention multiplies by its three weights at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from protlm.checkpoints.checks import Artifact
from protlm.model.selfattention import HEADS_OF_RELATIVES
from protlm.system.errors import UserError

_ADAPTERS = Artifact("adapter.safetensors", "adapter.json", "LoRA adapters", "finetune")
# The factor α / r.
_SCALE = 2.0
# Part of the names of W, A and B in the state of a network with adapters.
_PARTS = ".parametrizations.weight."
_W, _A, _B = f"{_PARTS}original", f"{_PARTS}0.A", f"{_PARTS}0.B"


class LowRank(nn.Module):
    """W + 2 B A with A [rank, in] and B [out, rank]; W at first: A is random and B is zero."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.A = nn.Parameter(layer.weight.new_empty(rank, layer.in_features))
        self.B = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))
        nn.init.kaiming_uniform_(self.A, a=5**0.5)

    def forward(self, weight: Tensor) -> Tensor:
        return _adapted_weight(weight, self.A, self.B)


def _adapted_weight(weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return weight + _SCALE * b @ a


def add_adapters(network: nn.Module, *, rank: int, targets: Sequence[str], seed: int) -> None:
    """Puts adapters into layers whose names end in a target; nothing else is trained.

    Heads of relatives have none: proteins are read alone.
    """
    layers = {
        name: one
        for name, one in network.named_modules()
        if isinstance(one, nn.Linear) and HEADS_OF_RELATIVES not in name
    }
    network.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, layer in layers.items():
            if name.startswith("blocks.") and name.rpartition(".")[2] in targets:
                parametrize.register_parametrization(
                    layer, "weight", LowRank(layer, rank), unsafe=True
                )


def check_targets(network: nn.Module, targets: Sequence[str]) -> None:
    """Makes sure that there are layers of these names."""
    names = {
        name.rpartition(".")[2]
        for name, one in network.named_modules()
        if isinstance(one, nn.Linear) and name.startswith("blocks.")
    }
    for target in targets:
        if target not in names:
            raise UserError(
                f"no layer is named {target!r}; there are: {', '.join(sorted(names))}",
                {"targets": "LAYERS"},
            )


def save_adapters(network: nn.Module, folder: Path) -> None:
    """Writes A and B of each layer, `LAYER.A` and `LAYER.B`, the scale, and checksums."""
    arrays = {
        f"{name}.{part}": getattr(adapter, part).detach().cpu().contiguous()
        for name, _, adapter in _adapted(network)
        for part in ("A", "B")
    }
    _ADAPTERS.write(folder, arrays, {"weight": "W + scale * B @ A", "scale": _SCALE})


def merge_adapters(network: nn.Module) -> None:
    """Adds the adapters to the weights of their layers, in place, and removes them."""
    for _, layer, _ in list(_adapted(network)):
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)


def merged_state(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the state of a network with the adapters merged, and what it was merged from."""
    adapters = {name: value for name, value in state.items() if _PARTS in name}
    merged = {name: value for name, value in state.items() if name not in adapters}
    for name, weight in adapters.items():
        if name.endswith(_W):
            layer = name.removesuffix(_W)
            merged[f"{layer}.weight"] = _adapted_weight(
                weight, adapters[layer + _A], adapters[layer + _B]
            )
    return merged, adapters


def separated_state(
    merged: Mapping[str, Tensor], adapters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns the state that `merged_state` divided."""
    weights = {f"{name.partition(_PARTS)[0]}.weight" for name in adapters}
    return {name: v for name, v in merged.items() if name not in weights} | dict(adapters)


def _adapted(network: nn.Module) -> Iterator[tuple[str, nn.Module, LowRank]]:
    for name, module in network.named_modules():
        if parametrize.is_parametrized(module, "weight"):
            parametrizations = module.parametrizations
            assert isinstance(parametrizations, nn.ModuleDict)
            (adapter,) = parametrizations["weight"]  # pyright: ignore[reportGeneralTypeIssues]
            assert isinstance(adapter, LowRank)
            yield name, module, adapter
