"""Linear attention on tensor cores: operands in bfloat16, sums in float32, emulated on a CPU."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.pretended_cuda import PretendedCuda
from protlm.attention import create
from protlm.attention.linearized import operands
from protlm.attention.ops import products
from tests.attention.test_contract import errors
from tests.attention.truth import HAS_FAR_KEYS

LENGTH = 257


@pytest.fixture
def rounds_operands(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Rounds operands as tensor cores do; holds the dtypes of the products so far."""
    seen: list[torch.dtype] = []

    def emulated(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        seen.append(dtype)
        # Products of bfloat16 are exact in float32.
        return x.to(dtype).float() @ y.to(dtype).float()

    monkeypatch.setattr(operands, "operand_dtype", lambda _: torch.bfloat16)
    monkeypatch.setattr(products, "_rounded_product", emulated)
    return seen


def test_errors_are_within_the_budget(
    performer: Any,
    causal: bool,
    make_inputs: Callable[..., Any],
    rounds_operands: list[torch.dtype],
) -> None:
    out, dq, dk, *others = errors(performer, causal, make_inputs(LENGTH).to(torch.bfloat16))
    assert rounds_operands
    assert max(out, *others) <= 1e-2
    # Differences of sums over the values, which cancel where a position sees few keys.
    assert max(dq, dk) <= 4e-2


@HAS_FAR_KEYS
def test_the_future_has_no_influence(
    performer: Any, make_inputs: Callable[..., Any], rounds_operands: list[torch.dtype]
) -> None:
    mechanism, inputs = performer.create(), make_inputs(LENGTH).to(torch.bfloat16)
    k_BHLK, v_BHLC = inputs.k_BHLK.clone(), inputs.v_BHLC.clone()
    k_BHLK[:, :, 100] *= 30
    v_BHLC[:, :, 100:] *= 1e4
    changed = inputs._replace(k_BHLK=k_BHLK, v_BHLC=v_BHLC)
    before, after = (x.run(mechanism, causal=True) for x in (inputs, changed))
    assert rounds_operands
    assert torch.equal(before[:, :, :100], after[:, :, :100])
    assert not torch.equal(before, after)


class Products(TorchDispatchMode):
    """Records the dtypes of the operands and the result of each product of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[tuple[torch.dtype, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.strip("_")
        if name in {"mm", "bmm", "addmm", "baddbmm"}:
            operands = args[1 if "add" in name else 0 :][:2]
            assert operands[0].dtype == operands[1].dtype
            self.made[operands[0].dtype, out.dtype] += 1
        return out


def products_on_cuda(inputs: Any, *, causal: bool) -> Counter[tuple[torch.dtype, torch.dtype]]:
    """Counts the products of a forward and backward pass, without computing them."""
    options = {"num_features": 32, "backend": "torch"}
    sizes = {"num_heads": 2, "head_dim": 8, "model_dim": 16, "max_length": LENGTH}
    mechanism = create("performer_relu", options, **sizes).to("meta")
    inputs = type(inputs)(*(x.to("meta") for x in inputs)).differentiable()
    with PretendedCuda(), Products() as products:
        out = inputs.run(mechanism, causal=causal)
        torch.autograd.backward([out], [torch.empty_like(out)])
    return products.made


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
def test_on_cuda_only_bfloat16_is_rounded_and_sums_are_float32(
    is_causal: bool, make_inputs: Callable[..., Any]
) -> None:
    inputs = make_inputs(LENGTH)
    rounded = products_on_cuda(inputs.to(torch.bfloat16), causal=is_causal)
    plain = products_on_cuda(inputs.to(torch.float32), causal=is_causal)
    is_rounded, is_plain = (torch.bfloat16, torch.float32), (torch.float32, torch.float32)
    assert set(rounded) == {is_rounded, is_plain} and set(plain) == {is_plain}
    # The rows multiply queries and keys in the forward and in the backward pass, and two gradients.
    assert rounded[is_plain] == 6
    # Six products of features, states and values; causal attention also has those within chunks.
    assert rounded[is_rounded] > 6 if is_causal else rounded[is_rounded] == 6
    assert plain.total() == rounded.total()
