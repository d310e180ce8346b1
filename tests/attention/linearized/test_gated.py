"""Decay from strong to weak, over many chunks, in float32; its limits; and what padding is not."""

import math

import pytest
import torch

from protlm.attention.linearized import gated
from protlm.attention.linearized.base import Performer
from protlm.attention.linearized.gates import Gate
from tests.attention.cases import HEAD_DIM, MODES, Case, Inputs, find_case, make_inputs
from tests.attention.test_contract import gradients, relative_error, steps
from tests.marks import slow_but
from tests.rounding import error_bound

DECAYS = pytest.mark.parametrize("decay", ["learned", "selective"])
FACTORS = pytest.mark.parametrize("factor", [0.0, 0.9, 0.9999])
NAMES = ["performer_relu", "performer_softmax"]
LENGTHS = [(name, length) for name in NAMES for length in (1, 64, 65, 600)]


def decaying(decay: str, factor: float, name: str = "performer_relu") -> tuple[Case, Performer]:
    """A case and its mechanism, whose gates are a factor, or around it; at 0, near 0 and near 1."""
    case = find_case(name, decay=decay)
    mechanism = case.create()
    mechanism.gate.bias.data.fill_(math.log(factor / (1 - factor)) if factor else 0)
    if mechanism.gate.weight is not None and not factor:
        mechanism.gate.weight.data *= 300
    return case, mechanism


@MODES
@DECAYS
@FACTORS
@pytest.mark.parametrize(("name", "length"), slow_but(LENGTHS, ("performer_relu", 600)))
def test_no_factor_and_length_underflows_or_drifts(name, length, factor, decay, causal):
    case, mechanism = decaying(decay, factor, name)
    inputs = make_inputs(length).to(torch.float32).differentiable()
    exact = inputs.to(torch.float64).differentiable()
    out, wide = inputs.run(mechanism, causal=causal), decaying(decay, factor, name)[1].double()
    expected = case.expected(wide, exact, causal=causal)
    found = [out, *gradients(out, inputs, mechanism)]
    wanted = [expected, *gradients(expected, exact, wide)]
    # At one position, decay has no effect, and nothing its gradient.
    is_empty = [x.abs().max() <= 1e-12 for x in wanted]
    *errors, bias = (
        relative_error(one, other) * (not none)
        for one, other, none in zip(found, wanted, is_empty, strict=True)
    )
    if not factor:
        # Sums of a chunk near 1,000 are rounded, and gradients of gates are differences of theirs.
        assert errors[0] <= 2e-4 and all(x.isfinite().all() for x in found)
        return
    assert max(errors) <= 2e-5
    # A sum over all positions, of either sign.
    assert bias <= 1e-4


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("chunks", [1, 2, 7, 8])
def test_chunks_may_be_summed_at_once_or_one_after_the_other(chunks, reverse):
    increments, first = torch.randn(2, 3, chunks, 5, 4).double(), torch.randn(2, 3, 5, 4).double()
    whole = torch.rand(2, 3, chunks, 1, 1).double()
    given = increments, whole, first
    found = gated._doubling(*given, reverse=reverse)
    torch.testing.assert_close(found, gated._scan(*given, reverse=reverse))


@pytest.mark.parametrize(("num_heads", "memories"), [(1, [512.0]), (3, [512.0, 128.0, 32.0])])
@DECAYS
def test_heads_first_remember_512_to_32_positions(decay, num_heads, memories):
    gate = Gate.of(decay, num_heads=num_heads, model_dim=16)
    torch.testing.assert_close(1 / torch.sigmoid(-gate.bias).detach(), torch.tensor(memories))
    assert (gate.weight is None) == (decay == "learned")
    gate.bias.data.copy_(torch.tensor([100.0, -100.0, 3.0])[:num_heads])
    logits_BHL1 = gate(torch.zeros(1, 5, 16), torch.ones(1, 5, dtype=torch.bool))
    assert logits_BHL1[0, :, 4, 0].tolist() == [15, -15, 3][:num_heads]


@pytest.mark.parametrize("every", [1, 200])
@pytest.mark.parametrize("name", NAMES)
def test_steps_round_no_more_than_what_closed_gates_let_through(name, every):
    """Each weight is rounded in its features, and in both operations of each step after its own."""
    length = 240
    inputs = make_inputs(length).without_padding().to(torch.float32)
    # Gates of 1 - 3e-7, and of 3e-7 at each `every`-th position.
    inputs.hidden_BLD[..., 0] = torch.where(torch.arange(length) % every == every - 1, -15.0, 15.0)
    mechanism = decaying("selective", 0.5, name)[1]
    mechanism.gate.weight.data.zero_()[:, 0] = 1
    _, out = steps(mechanism, inputs)
    exact = Inputs(*(x[:1] for x in inputs)).to(torch.float64)
    wide = mechanism.double()
    weights_BHLL = exact.map_of(wide, causal=True)
    past_LL = torch.arange(length)[:, None] - torch.arange(length)
    roundings_LL = mechanism.num_features + 2 * HEAD_DIM + 2 * past_LL.clamp(min=0)
    condition = (weights_BHLL * roundings_LL) @ exact.v_BHLC.abs()
    errors = (out[:1].double() - exact.run(wide, causal=True)).abs()
    assert bool((errors <= error_bound(torch.float32, condition, 1)).all())
