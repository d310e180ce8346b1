"""Linear attention on tensor cores: operands in bfloat16, sums in float32, emulated on a CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.pretended_cuda import PretendedCuda
from protlm.attention import create
from protlm.attention.linearized import operands
from protlm.attention.ops import products
from tests.attention.test_contract import gradients, relative_error

LENGTH = 257


def errors(case: Any, inputs: Any, *, causal: bool) -> list[float]:
    """The relative errors of the output and of all gradients, against the float64 reference."""
    mechanism, exact = case.create(), case.create().double()
    inputs = inputs.to(torch.bfloat16).differentiable()
    clean = inputs.to(torch.float64).with_padding(0.0).differentiable()
    out, expected = inputs.run(mechanism, causal=causal), case.expected(exact, clean, causal=causal)
    found = [out, *gradients(out, inputs, mechanism)]
    wanted = [expected, *gradients(expected, clean, exact)]
    return [relative_error(x, y) for x, y in zip(found, wanted, strict=True)]


@pytest.fixture
def rounds_operands(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Rounds operands as on CUDA; holds the dtypes of the products so far."""
    seen: list[torch.dtype] = []
    original = products._rounded_product

    def recorded(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        seen.append(dtype)
        return original(x, y, dtype)

    monkeypatch.setattr(operands, "operand_dtype", lambda _: torch.bfloat16)
    monkeypatch.setattr(products, "_rounded_product", recorded)
    return seen


def test_errors_are_within_the_budget(
    performer: Any,
    causal: bool,
    make_inputs: Callable[..., Any],
    rounds_operands: list[torch.dtype],
) -> None:
    out, dq, dk, *others = errors(performer, make_inputs(LENGTH), causal=causal)
    assert rounds_operands
    assert max(out, *others) <= 1e-2
    # Differences of sums over the values, which cancel where a position sees few keys.
    assert max(dq, dk) <= 4e-2


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
def test_on_cuda_only_bfloat16_is_rounded_and_sums_are_float32(
    dtype: torch.dtype,
    is_causal: bool,
    make_inputs: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, bmm = [], torch.bmm

    def recorded(x: Tensor, y: Tensor, **options: Any) -> Tensor:
        made.append((x.dtype, options))
        return bmm(x, y, **options)

    monkeypatch.setattr(torch, "bmm", recorded)
    options = {"num_features": 32, "kernel": "torch"}
    sizes = {"num_heads": 2, "head_dim": 8, "model_dim": 16, "max_length": LENGTH}
    mechanism = create("performer_relu", options, **sizes).to("meta")
    inputs = make_inputs(LENGTH).to(dtype)
    inputs = type(inputs)(*(x.to("meta") for x in inputs)).differentiable()
    with PretendedCuda():
        out = inputs.run(mechanism, causal=is_causal)
        torch.autograd.backward([out], [torch.empty_like(out)])
    rounded = (torch.bfloat16, {"out_dtype": torch.float32})
    plain = (torch.float32, {})
    # Six products of features, states and values; causal attention has as many within chunks.
    if dtype == torch.bfloat16:
        assert len(made) >= 6 and set(map(str, made)) == {str(rounded)}
    else:
        assert set(map(str, made)) <= {str(plain)}
