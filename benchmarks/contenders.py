"""Who takes part: every attention mechanism of protlm, built from its YAML, and the peers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from benchmarks import peers
from benchmarks.cases import DTYPES, HEAD_DIM, MODEL_DIM, NUM_HEADS, Attend, Case
from protlm.attention import Attention, create, names
from protlm.paths import conf_dir


@dataclass(frozen=True)
class Contender:
    """A way to compute attention.

    `prepare` makes the function of q, k and v that is timed; it raises `UnavailableError` where
    the contender cannot run.
    """

    name: str
    has_features: bool
    prepare: Callable[[Case, torch.device], Attend]


def contenders() -> dict[str, Contender]:
    """Everyone who takes part, by name: the peers first, then what protlm has."""
    others = [Contender(name, *peer) for name, peer in peers.PEERS.items()]
    ours = [Contender(name, "num_features" in _settings(name), _prepare_ours) for name in names()]
    return {contender.name: contender for contender in [*others, *ours]}


def grid(
    entrants: Iterable[Contender],
    *,
    causal: bool,
    length: int,
    features: Iterable[int],
    dtypes: Iterable[str],
) -> list[Case]:
    """Every contender in every number of features and precision, at one mode and length."""
    return [
        Case(entrant.name, count, causal, length, dtype)
        for dtype in dtypes
        for entrant in entrants
        for count in (features if entrant.has_features else [None])
    ]


def _settings(name: str) -> dict[str, Any]:
    settings = OmegaConf.to_container(OmegaConf.load(conf_dir() / "attention" / f"{name}.yaml"))
    assert isinstance(settings, dict)
    return {str(key): value for key, value in settings.items() if key != "name"}


def _prepare_ours(case: Case, device: torch.device) -> Attend:
    settings = _settings(case.contender)
    # A kernel that ships without a projection has its head's own coordinates as features.
    own_coordinates = case.features == HEAD_DIM and settings.get("num_features", 0) is None
    if case.features is not None and not own_coordinates:
        settings["num_features"] = case.features
    mechanism = create(
        case.contender,
        settings,
        num_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        model_dim=MODEL_DIM,
        max_length=case.length,
    ).to(device)
    if not (mechanism.supports_causal if case.causal else mechanism.supports_bidirectional):
        raise peers.UnavailableError(f"has no {case.mode} form")
    generator = torch.Generator().manual_seed(case.length)
    hidden_BLD = torch.randn(1, case.length, MODEL_DIM, generator=generator)
    hidden_BLD = hidden_BLD.to(device, DTYPES[case.dtype]).requires_grad_()
    mask_BL = torch.ones(1, case.length, dtype=torch.bool, device=device)
    return _Mechanism(mechanism, hidden_BLD, mask_BL, case.causal)


@dataclass(frozen=True)
class _Mechanism:
    """A mechanism with its hidden input, as it is timed."""

    mechanism: Attention
    hidden_BLD: Tensor
    mask_BL: Tensor
    causal: bool

    @property
    def more_leaves(self) -> list[Tensor]:
        """What has a gradient in training beside queries, keys and values."""
        return [self.hidden_BLD, *self.mechanism.parameters()]

    def __call__(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor) -> Tensor:
        return self.mechanism(
            q_BHLK,
            k_BHLK,
            v_BHLC,
            hidden_BLD=self.hidden_BLD,
            mask_BL=self.mask_BL,
            causal=self.causal,
        )
