"""Every mechanism with its O(L²) reference, what a reference is written with, and inputs.

A reference is one function of a `Given`, in O(L²) and float64, decorated by what it returns: the
`weights` of all pairs before masking and normalizing, their `logits`, or the `outputs`. Padding,
causality and normalizing are done here. It is found by the name of the mechanism.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import protlm.attention
from protlm.attention import Attention
from protlm.attention.base import Context
from protlm.bounds import Bounds
from protlm.system.paths import shipped

Options = Mapping[str, Any]

# For keys so far above the first one that causal linear attention cuts them.
HAS_FAR_KEYS = pytest.mark.filterwarnings("ignore:keys of causal attention")
# The logit of a pair that is not visible: finite, so that a row that sees nothing is not NaN.
NEVER = -1e300


class Given(NamedTuple):
    """What a mechanism is given, with 0 at padding, and its parameters and buffers by name."""

    q_BHLK: Tensor
    k_BHLK: Tensor
    v_BHLC: Tensor
    hidden_BLD: Tensor
    mask_BL: Tensor
    causal: bool
    options: Options
    tensors: Mapping[str, Tensor]
    sees_LL: Tensor | None = None

    @property
    def length(self) -> int:
        return self.q_BHLK.shape[2]

    @property
    def head_dim(self) -> int:
        return self.q_BHLK.shape[3]

    def distances(self) -> Tensor:
        """i - j of every row i and key j, LL."""
        position_L = torch.arange(self.length)
        return position_L[:, None] - position_L

    def visible(self) -> Tensor:
        """Which keys a row may see, B1LL: true positions, up to its own in causal mode.

        Or those of `sees_LL` among them.
        """
        visible_BLL = self.mask_BL[:, :, None] & self.mask_BL[:, None, :]
        if self.sees_LL is not None:
            visible_BLL = visible_BLL & self.sees_LL
        return (visible_BLL.tril() if self.causal else visible_BLL)[:, None]

    def logits(self) -> Tensor:
        """q·k / √K, BHLL."""
        return self.q_BHLK @ self.k_BHLK.mT / self.head_dim**0.5


@cache
def shipped_options(name: str) -> dict[str, Any]:
    """The options of the YAML file of a mechanism."""
    config = yaml.safe_load((shipped("conf") / "attention" / f"{name}.yaml").read_text())
    assert config.pop("name") == name
    return config


def visible_softmax(logits: Tensor, visible: Tensor) -> Tensor:
    """Computes softmax over the visible keys; 0 for a row that sees none."""
    return logits.masked_fill(~visible, NEVER).softmax(-1) * visible


def normalized(weights_BHLL: Tensor, given: Given) -> Tensor:
    """Divides the weighted sums of the visible values by the sums of their weights.

    With the option `denominator_floor`, which some mechanisms have.
    """
    weights_BHLL = weights_BHLL * given.visible()
    sums_BHLC = weights_BHLL @ given.v_BHLC
    totals_BHL1 = weights_BHLL.sum(-1, keepdim=True)
    if given.options.get("denominator_floor") is not None:
        totals_BHL1 = totals_BHL1.clamp(min=given.options["denominator_floor"])
    # A row that sees nothing is 0 / 1.
    return sums_BHLC / (totals_BHL1 + (totals_BHL1 == 0))


def gated_mean(given: Given, exponents_BHLK: Tensor, bias_HLL: Tensor | float) -> Tensor:
    """Computes σ(q_i) ⊙ Σ_j e^(x_j + w_ij) v_j / Σ_j e^(x_j + w_ij), arXiv 2105.14103, eq. 2."""
    bias = torch.as_tensor(bias_HLL)
    means = [
        visible_softmax(x_BHL[:, :, None] + bias, given.visible()) @ v_BHL[..., None]
        for x_BHL, v_BHL in zip(exponents_BHLK.unbind(-1), given.v_BHLC.unbind(-1), strict=True)
    ]
    return given.q_BHLK.sigmoid() * torch.cat(means, dim=-1)


def _sums_to_one(options: Options) -> bool:
    """A floor under the denominator makes some rows smaller."""
    return options.get("denominator_floor") is None


@dataclass(frozen=True)
class Reference:
    """A reference, and the options that it is compared with.

    Attributes:
        formula: what was decorated.
        finish: makes outputs of what the formula returns.
        cases: options that take the whole contract, beside those of the YAML file.
        further: options whose outputs, gradients and maps alone are compared.
        linear: whether the map is the output on identity values, by the options.
        sums_to_one: whether the rows of the map do, by the options.
    """

    formula: Callable[[Given], Tensor]
    finish: Callable[[Tensor, Given], Tensor]
    cases: Sequence[dict[str, Any]]
    further: Sequence[dict[str, Any]]
    linear: Callable[[Options], bool]
    sums_to_one: Callable[[Options], bool]

    def output(
        self,
        mechanism: nn.Module,
        options: Options,
        inputs: Any,
        causal: bool,
        sees_LL: Tensor | None = None,
    ) -> Tensor:
        """The output of the mechanism, whatever is at padding."""
        tensors = {**dict(mechanism.named_parameters()), **dict(mechanism.named_buffers())}
        dtype = inputs.q_BHLK.dtype
        tensors = {n: x.to(dtype) if x.is_floating_point() else x for n, x in tensors.items()}
        *heads, hidden_BLD, mask_BL = inputs
        heads = [torch.where(mask_BL[:, None, :, None], x, 0) for x in heads]
        hidden_BLD = torch.where(mask_BL[..., None], hidden_BLD, 0)
        return self.of(Given(*heads, hidden_BLD, mask_BL, causal, options, tensors, sees_LL))

    def of(self, given: Given) -> Tensor:
        """The output for what a mechanism is given."""
        return self.finish(self.formula(given), given) * given.mask_BL[:, None, :, None]


# By the name of the function, which is that of the mechanism.
REFERENCES: dict[str, Reference] = {}


def _decorator(finish: Callable[[Tensor, Given], Tensor]) -> Callable[..., Any]:
    def decorate(
        *cases: dict[str, Any],
        further: Sequence[dict[str, Any]] = (),
        linear: Callable[[Options], bool] = lambda _: True,
        sums_to_one: Callable[[Options], bool] = _sums_to_one,
    ) -> Callable[[Callable[[Given], Tensor]], Reference]:
        def register(formula: Callable[[Given], Tensor]) -> Reference:
            found = Reference(formula, finish, cases or ({},), further, linear, sums_to_one)
            return REFERENCES.setdefault(formula.__name__, found)

        return register

    return decorate


weights = _decorator(normalized)
logits = _decorator(lambda x_BHLL, given: visible_softmax(x_BHLL, given.visible()) @ given.v_BHLC)
outputs = _decorator(lambda out_BHLC, given: out_BHLC)


_REFERENCES = Path(__file__).parent / "references"
HEADS, HEAD_DIM, MODEL_DIM = 2, 8, 16
SIZES = {"num_heads": HEADS, "head_dim": HEAD_DIM, "model_dim": MODEL_DIM, "max_length": 64}
MODES = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
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

    def run(self, mechanism: Attention, *, causal: bool, bounds: Bounds | None = None) -> Tensor:
        return mechanism(*self[:3], Context(self.hidden_BLD, self.mask_BL, causal), bounds)

    def map_of(self, mechanism: Attention, *, causal: bool, rows: slice | None = None) -> Tensor:
        """The map of a mechanism, or some of its rows."""
        context = Context(self.hidden_BLD, self.mask_BL, causal)
        return mechanism.attention_map(*self[:2], context, rows)

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
        chosen = {**SIZES, "max_length": 2048, "seed": 1, **sizes}
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

    def expected(
        self,
        mechanism: Attention,
        inputs: Inputs,
        *,
        causal: bool,
        sees_LL: Tensor | None = None,
    ) -> Tensor:
        """The output by the O(L²) reference."""
        return self.reference.output(mechanism, self.options, inputs, causal, sees_LL)


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


def num_elements(state: Any) -> int:
    """Counts the elements of all tensors of a state, nested ones included."""
    if isinstance(state, Tensor):
        return state.numel()
    return sum(num_elements(part) for part in getattr(state, "__dict__", {}).values())


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
