"""Every mechanism with its O(L²) reference, found by name, and inputs with padding."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import protlm.attention
from protlm.attention import Attention
from tests.attention.truth import REFERENCES, Reference, shipped_options

_REFERENCES = Path(__file__).parent / "references"
HEADS, HEAD_DIM, MODEL_DIM = 2, 8, 16
# The standard deviation of what is added to parameters.
TRAINING = 0.2


class Inputs(NamedTuple):
    """What a mechanism takes; three samples: whole, padded behind, padded before and within."""

    q_BHLK: Tensor
    k_BHLK: Tensor
    v_BHLC: Tensor
    hidden_BLD: Tensor
    mask_BL: Tensor

    @classmethod
    def whole(cls, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor) -> "Inputs":
        """Without padding, and with the queries of the first head as the hidden input."""
        mask_BL = torch.ones(q_BHLK.shape[0], q_BHLK.shape[2], dtype=torch.bool)
        return cls(q_BHLK, k_BHLK, v_BHLC, q_BHLK[:, 0], mask_BL)

    def run(self, mechanism: Attention, *, causal: bool) -> Tensor:
        return mechanism(*self[:3], hidden_BLD=self.hidden_BLD, mask_BL=self.mask_BL, causal=causal)

    def map_of(self, mechanism: Attention, *, causal: bool, rows: slice | None = None) -> Tensor:
        """The map of a mechanism, or some of its rows."""
        rest = {"hidden_BLD": self.hidden_BLD, "mask_BL": self.mask_BL, "causal": causal}
        return mechanism.attention_map(*self[:2], **rest, rows=rows)

    def with_padding(self, value: float) -> "Inputs":
        """The same, with `value` at every padded position."""
        padding_BL1 = ~self.mask_BL[..., None]
        heads = [x.masked_fill(padding_BL1[:, None], value) for x in self[:3]]
        return Inputs(*heads, self.hidden_BLD.masked_fill(padding_BL1, value), self.mask_BL)

    def without_padding(self) -> "Inputs":
        """The same without a mask, and with 0.5 in place of the padding."""
        return self.with_padding(0.5)._replace(mask_BL=torch.ones_like(self.mask_BL))

    def differentiable(self) -> "Inputs":
        """The same values, as leaves that require gradients."""
        return Inputs(*(x.detach().clone().requires_grad_() for x in self[:4]), self.mask_BL)

    def to(self, dtype: torch.dtype) -> "Inputs":
        return Inputs(*(x.to(dtype) for x in self[:4]), self.mask_BL)


def make_inputs(length: int, *, head_dim: int = HEAD_DIM, seed: int = 0) -> Inputs:
    """Draws float64 inputs of a length; all padding is NaN."""
    generator = torch.Generator().manual_seed(seed)
    mask_BL = torch.ones(3, length, dtype=torch.bool)
    mask_BL[1, length // 2 :] = False
    mask_BL[2, : length // 5] = False
    mask_BL[2, length // 3 : length // 3 + length // 6] = False
    q_BHLK, k_BHLK, v_BHLC = torch.randn(
        3, 3, HEADS, length, head_dim, generator=generator, dtype=torch.float64
    )
    hidden_BLD = torch.randn(3, length, MODEL_DIM, generator=generator, dtype=torch.float64)
    return Inputs(q_BHLK, k_BHLK, v_BHLC, hidden_BLD, mask_BL).with_padding(torch.nan)


@dataclass(frozen=True)
class Case:
    """A mechanism with one set of options, and its reference."""

    name: str
    options: Mapping[str, Any]
    reference: Reference

    def create(self, **sizes: int) -> Attention:
        """Builds the mechanism, small unless sizes say otherwise, as if it had been trained.

        Many parameters are 0 or 1 initially, which would hide what multiplies them.
        """
        defaults = {"num_heads": HEADS, "head_dim": HEAD_DIM, "model_dim": MODEL_DIM}
        chosen = {**defaults, "max_length": 2048, "seed": 1, **sizes}
        # Parameters come from the global generator: two of the same seed have the same ones.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(chosen["seed"])
            mechanism = protlm.attention.create(self.name, self.options, **chosen)
            for parameter in mechanism.parameters():
                parameter.data.add_(TRAINING * torch.randn(parameter.shape))
        return mechanism

    @cached_property
    def modes(self) -> list[bool]:
        """The values of `causal` that it supports."""
        mechanism = self.create()
        supported = {False: mechanism.supports_bidirectional, True: mechanism.supports_causal}
        return [causal for causal, is_supported in supported.items() if is_supported]

    def expected(self, mechanism: Attention, inputs: Inputs, *, causal: bool) -> Tensor:
        """The output by the O(L²) reference."""
        return self.reference.output(mechanism, self.options, inputs, causal)


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [
            x.untyped_storage().nbytes() // x.itemsize
            for x in tree_leaves(out)
            if isinstance(x, Tensor)
        ]
        self.numel = max([self.numel, *sizes])
        return out


def find_case(name: str, **options: Any) -> Case:
    """A case of a mechanism with some options that are not those of its file."""
    for path in _REFERENCES.glob("*.py"):
        import_module(f"tests.attention.references.{path.stem}")
    assert name in REFERENCES, f"attention mechanism {name} has no reference: write one"
    return Case(name, shipped_options(name) | options, REFERENCES[name])


@cache
def all_cases() -> tuple[list[Case], list[Case]]:
    """The cases that take the whole contract, and the further ones."""
    whole, further = [], []
    for name in protlm.attention.names():
        reference = find_case(name).reference
        whole += [find_case(name, **variant) for variant in reference.cases]
        further += [find_case(name, **variant) for variant in reference.further]
    return whole, further


def case_id(case: Case) -> str:
    """The name of a mechanism, and the options that are not those of its file."""
    shipped = shipped_options(case.name)
    variant = [f"{key}={value}" for key, value in case.options.items() if value != shipped[key]]
    return "-".join([case.name, *variant])
