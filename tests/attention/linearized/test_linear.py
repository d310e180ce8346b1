"""Linear attention: gradients, tiles, threads, compilation, and rounding as by tensor cores.

And positive features where queries and keys are wide: no output and no gradient is lost. Logits of
features are then in the hundreds and thousands, and far from one another: exponentials of them,
relative to any one constant, are 0 or infinite in float32. Causal attention cuts those of keys far
above the first key's, and is compared with a formula that does so.
"""

import math
import warnings
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from protlm.attention import create
from protlm.attention.linearized import operands
from protlm.attention.linearized import tiles as tile_sizes
from protlm.attention.linearized.operands import largest_rise
from protlm.attention.ops import products
from protlm.attention.performer_softmax import PerformerSoftmax
from protlm.system.errors import UserError
from tests.attention.cases import HAS_FAR_KEYS, HEADS, MODES, SIZES, Inputs, make_inputs
from tests.attention.test_contract import assert_reference, errors, gradients, steps
from tests.fixtures.pretended_cuda import PretendedCuda
from tests.marks import slow_but

pytestmark = HAS_FAR_KEYS


@pytest.mark.portable
def test_blocks_of_rows_join(any_performer, causal):
    assert_reference(any_performer, causal, make_inputs(513))


@pytest.mark.parametrize("name", ["performer_softmax", "performer_relu"])
@MODES
def test_the_number_of_threads_may_change_before_the_backward_pass(name, causal):
    mechanism, results, threads = create(name, {}, **SIZES), [], torch.get_num_threads()
    for change in (0, 1):
        # Long enough for several tiles, whose size depends on the threads.
        inputs = make_inputs(2500).to(torch.float32).differentiable()
        out = inputs.run(mechanism, causal=causal)
        try:
            torch.set_num_threads(threads + change)
            results.append([out, *torch.autograd.grad(out.sin().sum(), inputs[:3])])
        finally:
            torch.set_num_threads(threads)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "decay", "causal", "scale"),
    [
        ("performer_relu", "none", False, 1.0),
        # Keys far above the first one.
        ("performer_softmax", "none", True, 30.0),
        ("performer_relu", "selective", False, 1.0),
        ("performer_softmax", "selective", True, 1.0),
    ],
)
def test_torch_compile_sees_one_graph_with_the_same_result(name, decay, causal, scale):
    mechanism, results = create(name, {"decay": decay}, **SIZES), []
    for compile_ in (lambda f: f, partial(torch.compile, backend="aot_eager", fullgraph=True)):
        inputs = make_inputs(70).to(torch.float32)
        inputs = inputs._replace(k_BHLK=scale * inputs.k_BHLK).differentiable()
        out = compile_(partial(type(inputs).run, causal=causal))(inputs, mechanism)
        results.append([out, *torch.autograd.grad(out.sin().sum(), inputs[:3])])
    torch.testing.assert_close(*results, rtol=1e-5 * scale, atol=1e-5 * scale)


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
def test_a_redraw_before_the_backward_pass_is_an_error(causal):
    mechanism = create("performer_softmax", {}, **SIZES)
    out = make_inputs(5).to(torch.float32).differentiable().run(mechanism, causal=causal)
    mechanism.redraw(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_float16_is_rejected_with_the_reason(performer, causal):
    mechanism, inputs = performer.create(), make_inputs(5).to(torch.float16)
    for refused in (inputs.run, inputs.map_of):
        with pytest.raises(UserError, match=r"range of float16.*dtype=torch.bfloat16 or float32"):
            refused(mechanism, causal=causal)
    try:
        torch.set_default_dtype(torch.float16)
        with pytest.raises(UserError, match="range of float16"):
            performer.create()
    finally:
        torch.set_default_dtype(torch.float32)


LENGTH = 257


@pytest.fixture
def rounds_operands(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Rounds operands as tensor cores do; holds the dtypes of the products so far."""
    seen: list[torch.dtype] = []

    def emulated(x: Tensor, y: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        seen.append(dtype)
        # Products of bfloat16 are exact in float32.
        out = x.to(dtype).float() @ y.to(dtype).float()
        return out if bias is None else out + bias[..., None, :]

    monkeypatch.setattr(operands, "operand_dtype", lambda _: torch.bfloat16)
    monkeypatch.setattr(operands, "may_round_on_cpu", lambda _: False)
    monkeypatch.setattr(products, "_rounded_product", emulated)
    return seen


def test_errors_are_within_the_budget(performer, causal, rounds_operands):
    out, dq, dk, dv, *of_gates = errors(performer, causal, make_inputs(LENGTH).to(torch.bfloat16))
    assert rounds_operands
    assert max(out, dv) <= 1e-2
    # Differences of sums over the values, which cancel where a position sees few keys.
    assert max(dq, dk, *of_gates) <= 4e-2


@pytest.fixture
def multiplies_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a processor without bfloat16 products emulate them; tiles have 64 positions."""
    monkeypatch.setattr(products, "cpu_multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(tile_sizes, "_CPU_POSITIONS", 32)


def rising(length: int) -> Inputs:
    """Keys whose logits rise from tile to tile, and one sample that begins with padding."""
    inputs = make_inputs(length)
    rise_L1 = torch.linspace(0.5, 2, length, dtype=torch.float64)[:, None]
    mask_BL = inputs.mask_BL.clone()
    mask_BL[0, :70] = False
    return inputs._replace(k_BHLK=inputs.k_BHLK * rise_L1, mask_BL=mask_BL).to(torch.bfloat16)


@pytest.mark.portable
@pytest.mark.usefixtures("multiplies_bfloat16")
def test_errors_of_bfloat16_products_on_a_cpu_are_within_the_bound(performer, causal):
    for inputs in (make_inputs(LENGTH).to(torch.bfloat16), rising(LENGTH)):
        out, dq, dk, dv, *_ = errors(performer, causal, inputs)
        assert max(out, dv) <= 1e-2 and max(dq, dk) <= 2e-2


@pytest.mark.parametrize("has", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["performer_relu", "performer_softmax", "linear"])
@MODES
def test_a_cpu_rounds_what_it_multiplies(name, causal, has, monkeypatch):
    """Where the processor has products of bfloat16, and weights are of softmax or ReLU features."""
    monkeypatch.setattr(products, "cpu_multiplies_bfloat16", lambda: has)
    mechanism = create(name, {}, **SIZES)
    inputs = make_inputs(LENGTH).to(torch.bfloat16).differentiable()
    with Products() as made:
        inputs.run(mechanism, causal=causal).sum().backward()
    assert (torch.bfloat16 in {operand for operand, _ in made.made}) == (has and name != "linear")


class Products(TorchDispatchMode):
    """Records the dtypes of the operands and the result of each product of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[tuple[torch.dtype, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.strip("_")
        if name in {"mm", "bmm", "addmm", "baddbmm", "linear_pointwise"}:
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
def test_on_cuda_only_bfloat16_is_rounded_and_sums_are_float32(causal):
    inputs = make_inputs(LENGTH)
    rounded = products_on_cuda(inputs.to(torch.bfloat16), causal=causal)
    plain = products_on_cuda(inputs.to(torch.float32), causal=causal)
    is_rounded, is_plain = (torch.bfloat16, torch.float32), (torch.float32, torch.float32)
    assert set(rounded) == {is_rounded, is_plain} and set(plain) == {is_plain}
    # The rows multiply queries and keys in the forward and in the backward pass, and two gradients.
    assert rounded[is_plain] == 6
    # Six products of features, states and values; causal attention also has those within chunks.
    assert rounded[is_rounded] > 6 if causal else rounded[is_rounded] == 6
    assert plain.total() == rounded.total()


DIM, WIDE, FEATURES, WIDE_LENGTH = 64, 512, 64, 150
# Standard deviations of a coordinate; 1 is what an untrained model has.
SCALES = [1.0, 6.0, 20.0]
VARIANTS: dict[str, dict[str, Any]] = {
    "positive": {},
    "optimal": {"optimal_for": 4.0},
    "hyperbolic": {"estimator": "hyperbolic", "projection": "iid"},
    "wide": {"optimal_for": 200.0},
}


def wide_inputs(scale: float, *, length: int = WIDE_LENGTH, head_dim: int = DIM) -> Inputs:
    """Draws inputs of the contract with wide queries and keys, which float32 represents."""
    x = make_inputs(length, head_dim=head_dim, seed=int(scale))
    return x._replace(q_BHLK=scale * x.q_BHLK, k_BHLK=scale * x.k_BHLK).to(torch.float32)


def favor(options: Mapping[str, Any], dim: int = DIM) -> PerformerSoftmax:
    sizes = {"num_heads": HEADS, "head_dim": dim, "model_dim": HEADS * dim, "max_length": 1}
    return create("performer_softmax", {"num_features": FEATURES, **options}, **sizes)


def logits(performer: PerformerSoftmax, x: Inputs) -> tuple[Tensor, Tensor]:
    """Lemma 1's logits of queries and keys, natural logarithms, from the projection alone."""
    rows_RK = performer.projection.to(x.q_BHLK.dtype)
    stretch, dim = 1.0, rows_RK.shape[1]
    square_norm = performer.optimal_for
    if square_norm is not None:
        twice = 2 * square_norm + dim
        root = math.sqrt(twice**2 + 8 * dim * square_norm)
        stretch = math.sqrt((1 + (root + twice) / (2 * dim)) / 2)
    q_BHLK, k_BHLK = (y * dim**-0.25 for y in x[:2])
    bias_R = (1 - stretch**2) * rows_RK.square().sum(-1) / 2
    query_BHLR = stretch * q_BHLK @ rows_RK.mT + bias_R
    key_BHLR = stretch * k_BHLK @ rows_RK.mT - k_BHLK.square().sum(-1, keepdim=True) / 2
    return query_BHLR, key_BHLR


def weights(
    performer: PerformerSoftmax, x: Inputs, *, causal: bool, dtype: torch.dtype | None = None
) -> Tensor:
    """The normalized weights, BHLL, by logarithms of the sums over features and over keys.

    Causal logits of keys are cut as in a dtype, if one is given; their gradients are not.
    """
    query_BHLR, key_BHLR = logits(performer, x)
    if causal and dtype is not None:
        first_B111 = x.mask_BL.int().argmax(1)[:, None, None, None]
        highest = key_BHLR.gather(2, first_B111.expand(-1, HEADS, 1, FEATURES))
        highest = highest + largest_rise(dtype) * math.log(2)
        key_BHLR = key_BHLR - (key_BHLR - highest).clamp(min=0).detach()
    scores = torch.logsumexp(query_BHLR[:, :, :, None] + key_BHLR[:, :, None], dim=-1)
    visible = x.mask_BL[:, None, :, None] & x.mask_BL[:, None, None]
    if causal:
        visible = visible.tril()
    return scores.masked_fill(~visible, -1e300).softmax(dim=-1) * visible


def results(performer: PerformerSoftmax, out: Tensor, x: Inputs) -> list[Tensor]:
    """The output, and the gradients of q, k and v for a fixed random cotangent."""
    return [out.detach(), *gradients(out, x, performer)[:3]]


def budget(performer: PerformerSoftmax, x: Inputs, dtype: torch.dtype) -> float:
    """The relative error of a weight that rounding its logits may make.

    A logit is a sum of some √K terms of random signs, each rounded, of at most the size of the
    largest; a relative error of a weight is an error of its logit.
    """
    largest = max(
        float(y.detach()[x.mask_BL[:, None].expand(y.shape[:3])].abs().max())
        for y in logits(performer, x)
    )
    return torch.finfo(dtype).eps * (1 + largest) * 4


@MODES
@pytest.mark.parametrize("variant", slow_but(VARIANTS, "optimal"))
@pytest.mark.parametrize("scale", slow_but(SCALES, 6.0))
@pytest.mark.parametrize("positions", [32, 1 << 11])
@pytest.mark.portable
def test_outputs_gradients_and_maps_are_the_reference(
    positions, scale, variant, causal, monkeypatch
):
    """In one tile, and where references and states cross tiles and padding fills whole ones."""
    monkeypatch.setattr(tile_sizes, "_CPU_POSITIONS", positions)
    dim = WIDE if variant == "wide" else DIM
    performer, x = favor(VARIANTS[variant], dim), wide_inputs(scale, head_dim=dim)
    clean = x.with_padding(0.0).to(torch.float64).differentiable()
    for dtype in (torch.float32, torch.float64):
        map_ = weights(performer, clean, causal=causal, dtype=dtype)
        wanted = results(performer, map_ @ clean.v_BHLC, clean)
        leaves = x.to(dtype).differentiable()
        bound = budget(performer, clean, dtype)
        found = results(performer, leaves.run(performer, causal=causal), leaves)
        rows_BHLL = leaves.map_of(performer, causal=causal, rows=slice(40, 97)).detach()
        assert (rows_BHLL - map_[:, :, 40:97]).norm() <= bound * map_[:, :, 40:97].norm()
        for one, other in zip(found, wanted, strict=True):
            assert (one.double() - other).norm() <= bound * other.norm()
        # A residue's output is a mean of values, which are not 0.
        assert found[0].abs().amax(dim=-1).transpose(1, 2)[x.mask_BL].all()
        for one, other in zip(found[1:], wanted[1:], strict=True):
            matters = other.abs() > 1e-6 * other.abs().max()
            assert one[matters].ne(0).all()


@pytest.mark.parametrize("scale", [1.0, 6.0, 20.0])
def test_steps_are_the_reference(scale):
    """And not cut: their reference rises from step to step."""
    performer = favor({})
    x = wide_inputs(scale).without_padding()
    expected = weights(performer, x.to(torch.float64), causal=True) @ x.v_BHLC.double()
    _, out = steps(performer, x)
    bound = budget(performer, x.to(torch.float64), torch.float32)
    assert (out.double() - expected).norm() <= bound * expected.norm()
    assert out.abs().amax(dim=-1).all()


@pytest.mark.filterwarnings("default:keys of causal attention")
def test_a_cut_is_told():
    """Only if there is one, even among NaN, and with the remedy."""
    performer = favor({})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wide_inputs(1.0).run(performer, causal=True)
        wide_inputs(11.0).run(performer, causal=False)
        unmasked_BL = torch.ones(3, WIDE_LENGTH, dtype=torch.bool)
        wide_inputs(1.0)._replace(mask_BL=unmasked_BL).run(performer, causal=True)
    with pytest.warns(UserWarning, match=r"more than 2\^64 times .* model\.qk_norm=true"):
        wide_inputs(11.0).run(performer, causal=True)
