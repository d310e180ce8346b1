"""Linear attention: gradients, tiles, threads, compilation, and rounding as by tensor cores."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.pretended_cuda import PretendedCuda
from protlm.attention import create
from protlm.attention.base import RandomFeatures
from protlm.attention.linearized import operands
from protlm.attention.ops import products
from protlm.system.errors import UserError
from tests.attention.cases import Inputs, make_inputs
from tests.attention.test_contract import assert_reference, errors
from tests.attention.truth import HAS_FAR_KEYS
from tests.marks import slow_but

SIZES = {"num_heads": 2, "head_dim": 8, "model_dim": 16, "max_length": 64}
MODES = pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])


@pytest.mark.parametrize("length", slow_but([512, 513, 1100], 513))
@pytest.mark.portable
def test_blocks_of_rows_join(performer, causal, length):
    assert_reference(performer, causal, make_inputs(length))


@pytest.mark.slow
@pytest.mark.portable
def test_blocks_of_rows_join_with_further_options(further_performer, causal):
    assert_reference(further_performer, causal, make_inputs(600))


@pytest.mark.parametrize("name", ["performer_softmax", "performer_relu"])
@MODES
def test_the_number_of_threads_may_change_before_the_backward_pass(name, is_causal):
    mechanism, results, threads = create(name, {}, **SIZES), [], torch.get_num_threads()
    for change in (0, 1):
        # Long enough for several tiles, whose size depends on the threads.
        inputs = make_inputs(2500).to(torch.float32).differentiable()
        out = inputs.run(mechanism, causal=is_causal)
        try:
            torch.set_num_threads(threads + change)
            results.append([out, *torch.autograd.grad(out.sin().sum(), inputs[:3])])
        finally:
            torch.set_num_threads(threads)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


COMPILED = [
    ("performer_relu", False, 1.0),
    ("performer_relu", True, 1.0),
    ("performer_softmax", False, 1.0),
    ("performer_softmax", True, 1.0),
    # Keys far above the first one.
    ("performer_softmax", True, 30.0),
]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@HAS_FAR_KEYS
@pytest.mark.parametrize(("name", "is_causal", "scale"), slow_but(COMPILED, COMPILED[0]))
def test_torch_compile_sees_one_graph_with_the_same_result(name, is_causal, scale):
    mechanism, results = create(name, {}, **SIZES), []
    for compile_ in (lambda f: f, partial(torch.compile, backend="aot_eager", fullgraph=True)):
        inputs = make_inputs(70).to(torch.float32)
        inputs = inputs._replace(k_BHLK=scale * inputs.k_BHLK).differentiable()
        out = compile_(partial(type(inputs).run, causal=is_causal))(inputs, mechanism)
        results.append([out, *torch.autograd.grad(out.sin().sum(), inputs[:3])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5 * scale, atol=1e-5 * scale)


def test_a_nan_gradient_at_padding_has_no_influence(performer, causal):
    mechanism = performer.create()
    inputs = make_inputs(70).to(torch.float32).differentiable()
    out = inputs.run(mechanism, causal=causal)
    cotangent = torch.ones_like(out).masked_fill(~inputs.mask_BL[:, None, :, None], torch.nan)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out, inputs[:3], cotangent))


def test_a_second_derivative_is_rejected(performer, causal):
    inputs = make_inputs(5).differentiable()
    out = inputs.run(performer.create().double(), causal=causal)
    (gradient,) = torch.autograd.grad(out.square().sum(), inputs.q_BHLK, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@MODES
def test_a_redraw_before_the_backward_pass_is_an_error(is_causal):
    mechanism = create("performer_softmax", {}, **SIZES)
    inputs = make_inputs(5).to(torch.float32).differentiable()
    out = inputs.run(mechanism, causal=is_causal)
    assert isinstance(mechanism, RandomFeatures)
    mechanism.redraw(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_float16_is_rejected_with_the_reason(performer, causal):
    mechanism, inputs = performer.create(), make_inputs(5).to(torch.float16)
    for refused in (inputs.run, inputs.map_of):
        with pytest.raises(UserError, match=r"range of float16.*bf16"):
            refused(mechanism, causal=causal)


@MODES
def test_absolute_rows_of_a_map_with_an_output_norm_sum_to_one(is_causal):
    # Of this kernel weights are negative too.
    options = {"kernel": "identity", "num_features": 20, "normalizer": "rmsnorm"}
    mechanism = create("performer_generalized", options, **SIZES).double()
    inputs = make_inputs(20)
    found = inputs.map_of(mechanism, causal=is_causal)
    visible = inputs.mask_BL[:, None, :, None] & inputs.mask_BL[:, None, None]
    visible = visible.tril() if is_causal else visible
    weights = mechanism.kernel(*inputs.with_padding(0.0)[:2]) * visible
    assert weights.lt(0).any()
    totals = weights.abs().sum(-1, keepdim=True)
    torch.testing.assert_close(found, weights / (totals + (totals == 0)), rtol=1e-10, atol=1e-10)


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


def test_errors_are_within_the_budget(performer, causal, rounds_operands):
    out, dq, dk, *others = errors(performer, causal, make_inputs(LENGTH).to(torch.bfloat16))
    assert rounds_operands
    assert max(out, *others) <= 1e-2
    # Differences of sums over the values, which cancel where a position sees few keys.
    assert max(dq, dk) <= 4e-2


@HAS_FAR_KEYS
def test_the_future_has_no_influence(performer, rounds_operands):
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


def products_on_cuda(inputs: Inputs, *, causal: bool) -> Counter[tuple[torch.dtype, torch.dtype]]:
    """Counts the products of a forward and backward pass, without computing them."""
    options = {"num_features": 32, "backend": "torch"}
    mechanism = create("performer_relu", options, **SIZES).to("meta")
    inputs = type(inputs)(*(x.to("meta") for x in inputs)).differentiable()
    with PretendedCuda(), Products() as products:
        out = inputs.run(mechanism, causal=causal)
        torch.autograd.backward([out], [torch.empty_like(out)])
    return products.made


@MODES
def test_on_cuda_only_bfloat16_is_rounded_and_sums_are_float32(is_causal):
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
