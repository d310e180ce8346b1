"""Positive features where queries and keys are wide: no output and no gradient is lost.

Logits of features are then in the hundreds and thousands, and far from one another: exponentials of
them, relative to any one constant, are 0 or infinite in float32. Causal attention cuts those of
keys far above the first key's, and is compared with a formula that does so.
"""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from protlm.attention import create
from protlm.attention.base import Recurrent
from protlm.attention.linearized.operands import largest_rise
from protlm.attention.performer_softmax import PerformerSoftmax
from tests.attention.cases import Inputs, make_inputs
from tests.attention.truth import HAS_FAR_KEYS
from tests.marks import slow_but

HEADS, DIM, WIDE, FEATURES, LENGTH = 2, 64, 512, 64, 150
# Standard deviations of a coordinate; 1 is what an untrained model has.
SCALES = [1.0, 4.0, 6.0, 11.0, 20.0]
VARIANTS: dict[str, dict[str, Any]] = {
    "positive": {},
    "optimal": {"optimal_for": 4.0},
    "hyperbolic": {"estimator": "hyperbolic", "projection": "iid"},
    "wide": {"optimal_for": 200.0},
}
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
pytestmark = HAS_FAR_KEYS


def wide_inputs(scale: float, *, length: int = LENGTH, head_dim: int = DIM) -> Inputs:
    """Draws inputs of the contract with wide queries and keys, which float32 represents."""
    x = make_inputs(length, head_dim=head_dim, seed=int(scale))
    return x._replace(q_BHLK=scale * x.q_BHLK, k_BHLK=scale * x.k_BHLK).to(torch.float32)


def mechanism(options: Mapping[str, Any], dim: int = DIM) -> PerformerSoftmax:
    sizes = {"num_heads": HEADS, "head_dim": dim, "model_dim": HEADS * dim, "max_length": 1}
    made = create("performer_softmax", {"num_features": FEATURES, **options}, **sizes)
    assert isinstance(made, PerformerSoftmax)
    return made


def logits(performer: PerformerSoftmax, x: Inputs) -> tuple[Tensor, Tensor]:
    """Lemma 1's logits of queries and keys, natural logarithms, from the projection alone."""
    assert performer.projection is not None
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


def results(out: Tensor, x: Inputs) -> list[Tensor]:
    """The output, and the gradients of q, k and v for a fixed random cotangent."""
    generator = torch.Generator().manual_seed(3)
    cotangent = torch.randn(out.shape, generator=generator).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, x[:3], cotangent)]


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


@CAUSAL
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scale", slow_but(SCALES, 6.0, 20.0))
@pytest.mark.portable
def test_outputs_and_gradients_are_the_reference(scale, variant, causal):
    dim = WIDE if variant == "wide" else DIM
    performer, x = mechanism(VARIANTS[variant], dim), wide_inputs(scale, head_dim=dim)
    clean = x.with_padding(0.0).to(torch.float64).differentiable()
    for dtype in (torch.float32, torch.float64):
        map_ = weights(performer, clean, causal=causal, dtype=dtype)
        wanted = results(map_ @ clean.v_BHLC, clean)
        leaves = x.to(dtype).differentiable()
        bound = budget(performer, clean, dtype)
        found = results(leaves.run(performer, causal=causal), leaves)
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
    performer = mechanism({})
    assert isinstance(performer, Recurrent)
    x = wide_inputs(scale).without_padding()
    expected = weights(performer, x.to(torch.float64), causal=True) @ x.v_BHLC.double()
    state = performer.initial_state(x.k_BHLK[:, :, 0], x.v_BHLC[:, :, 0])
    size, outs = state.numel(), []
    for place in range(LENGTH):
        at = [y[:, :, place] for y in x[:3]]
        state, out_BHC = performer.step(state, *at, hidden_BD=at[0][:, 0])
        outs.append(out_BHC)
    assert state.numel() == size
    out = torch.stack(outs, dim=2)
    bound = budget(performer, x.to(torch.float64), torch.float32)
    assert (out.double() - expected).norm() <= bound * expected.norm()
    assert out.abs().amax(dim=-1).all()


@CAUSAL
@pytest.mark.parametrize("normalizer", ["denominator", "rmsnorm"])
@pytest.mark.parametrize("scale", [1.0, 6.0, 20.0])
def test_maps_are_the_reference(scale, normalizer, causal):
    performer, x = mechanism({"normalizer": normalizer}), wide_inputs(scale)
    clean = x.with_padding(0.0).to(torch.float64)
    rows = slice(40, 97)
    found = x.map_of(performer, causal=causal, rows=rows)
    expected = weights(performer, clean, causal=causal, dtype=torch.float32)[:, :, rows]
    assert (found - expected).norm() <= budget(performer, clean, torch.float32) * expected.norm()


@pytest.mark.parametrize("scale", [1.0, 6.0])
@pytest.mark.parametrize("position", [1, 63, 64, 600])
def test_the_past_does_not_see_the_future(position, scale):
    """Whether later logits rise far above those before, or fall far below, or are not a number."""
    performer, x = mechanism({}), wide_inputs(scale, length=650).without_padding()
    before = x.run(performer, causal=True)
    assert performer.projection is not None
    # The key with the largest logit of the first feature, |ω|²/2.
    beside = performer.projection[0] * DIM**0.25
    for key in (beside, 100 * beside, torch.full_like(beside, math.nan)):
        k_BHLK = x.k_BHLK.clone()
        k_BHLK[:, :, position] = key
        after = x._replace(k_BHLK=k_BHLK).run(performer, causal=True)
        # A NaN reaches all of its chunk.
        end = position if key.isfinite().all() else position // 64 * 64
        assert torch.equal(before[:, :, :end], after[:, :, :end])
        assert not torch.equal(before, after)


@CAUSAL
@pytest.mark.parametrize("scale", [6.0, 20.0])
def test_several_tiles_are_one(scale, causal, monkeypatch):
    """References and states that cross tiles, and padding that fills whole tiles."""
    performer, found = mechanism({}), []
    for positions in (1 << 11, 64):
        monkeypatch.setattr("protlm.attention.linearized.tiles._CPU_POSITIONS", positions)
        x = wide_inputs(scale, length=400).to(torch.float64).differentiable()
        found.append(results(x.run(performer, causal=causal), x))
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 1e-11 * other.norm()


@pytest.mark.filterwarnings("default:keys of causal attention")
def test_a_cut_is_told():
    """Only if there is one, even among NaN, and with the remedy."""
    performer = mechanism({})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wide_inputs(1.0).run(performer, causal=True)
        wide_inputs(11.0).run(performer, causal=False)
        wide_inputs(1.0)._replace(mask_BL=torch.ones(3, LENGTH) > 0).run(performer, causal=True)
    with pytest.warns(UserWarning, match=r"more than 2\^64 times .* model\.qk_norm=true"):
        wide_inputs(11.0).run(performer, causal=True)
