"""What a reference is written with: the formula of a mechanism, and what all formulas share.

A reference is one function of a `Given`, in O(L²) and float64, decorated by what it returns: the
`weights` of all pairs before masking and normalizing, their `logits`, or the `outputs`. Padding,
causality and normalizing are done here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from torch import Tensor, nn

from protlm.system.paths import conf_dir

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
        """Which keys a row may see, B1LL: true positions, up to its own in causal mode."""
        visible_BLL = self.mask_BL[:, :, None] & self.mask_BL[:, None, :]
        return (visible_BLL.tril() if self.causal else visible_BLL)[:, None]

    def logits(self) -> Tensor:
        """q·k / √K, BHLL."""
        return self.q_BHLK @ self.k_BHLK.mT / self.head_dim**0.5


@cache
def shipped_options(name: str) -> dict[str, Any]:
    """The options of the YAML file of a mechanism."""
    config = yaml.safe_load((conf_dir() / "attention" / f"{name}.yaml").read_text())
    assert config.pop("name") == name
    return config


def visible_softmax(logits: Tensor, visible: Tensor) -> Tensor:
    """Computes softmax over the visible keys; 0 for a row that sees none."""
    return logits.masked_fill(~visible, NEVER).softmax(-1) * visible


def normalized(weights_BHLL: Tensor, given: Given) -> Tensor:
    """Divides the weighted sums of the visible values by the sums of their weights, or their norm.

    By the options `normalizer` and `denominator_floor`, which some mechanisms have.
    """
    weights_BHLL = weights_BHLL * given.visible()
    sums_BHLC = weights_BHLL @ given.v_BHLC
    if given.options.get("normalizer") == "rmsnorm":
        divisor_BHL1 = sums_BHLC.square().mean(-1, keepdim=True)
        return sums_BHLC / (divisor_BHL1 + (divisor_BHL1 == 0)).sqrt()
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


def _has_means(options: Options) -> bool:
    """An output norm is not linear in the values."""
    return options.get("normalizer") != "rmsnorm"


def _sums_to_one(options: Options) -> bool:
    """A floor under the denominator makes some rows smaller."""
    return _has_means(options) and options.get("denominator_floor") is None


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

    def output(self, mechanism: nn.Module, options: Options, inputs: Any, causal: bool) -> Tensor:
        """The output of the mechanism, whatever is at padding."""
        tensors = {**dict(mechanism.named_parameters()), **dict(mechanism.named_buffers())}
        dtype = inputs.q_BHLK.dtype
        tensors = {n: x.to(dtype) if x.is_floating_point() else x for n, x in tensors.items()}
        *heads, hidden_BLD, mask_BL = inputs
        heads = [torch.where(mask_BL[:, None, :, None], x, 0) for x in heads]
        hidden_BLD = torch.where(mask_BL[..., None], hidden_BLD, 0)
        return self.of(Given(*heads, hidden_BLD, mask_BL, causal, options, tensors))

    def of(self, given: Given) -> Tensor:
        """The output for what a mechanism is given."""
        return self.finish(self.formula(given), given) * given.mask_BL[:, None, :, None]


# By the name of the function, which is that of the mechanism.
REFERENCES: dict[str, Reference] = {}


def _decorator(finish: Callable[[Tensor, Given], Tensor]) -> Callable[..., Any]:
    def decorate(
        *cases: dict[str, Any],
        further: Sequence[dict[str, Any]] = (),
        linear: Callable[[Options], bool] = _has_means,
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
