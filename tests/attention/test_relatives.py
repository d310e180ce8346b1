"""Families of packed proteins: what each sees of its relatives, against O(L²) references."""

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from protlm.attention.base import Attention, Context
from protlm.attention.hybrid import Hybrid
from protlm.attention.relatives import View
from protlm.bounds import Bounds
from tests.attention.cases import Case, Inputs, find_case, make_inputs
from tests.attention.test_contract import gradients, relative_error

pytestmark = pytest.mark.contract
# Families of proteins, in rows with padding behind them.
FAMILIES = [[5, 64, 3], [7], [65, 30, 1]]
LENGTHS = [length for family in FAMILIES for length in family]
SPANS = [*pairwise(accumulate(LENGTHS, initial=0))]
TOTAL, SIZES = sum(LENGTHS) + 9, [len(family) for family in FAMILIES]
BOUNDS = Bounds.of(SPANS, (1, TOTAL), longest=65, families=SIZES)


def numbers(lengths: list[int]) -> Tensor:
    """The number of each position of the row; -1 of padding."""
    number_L = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return torch.cat([number_L, torch.full((TOTAL - len(number_L),), -1)])


PROTEIN_L, FAMILY_L = numbers(LENGTHS), numbers([sum(family) for family in FAMILIES])


def sees(*, later: bool, own: bool, causal: bool = False) -> Tensor:
    """Which keys a row sees, LL, from the definition."""
    protein, other = PROTEIN_L[:, None], PROTEIN_L[None]
    kin = (other < protein) | ((other != protein) & later)
    mine = (other == protein) & own
    if causal:
        mine = mine.tril()
    return (FAMILY_L[:, None] == FAMILY_L[None]) & (kin | mine)


def joined(seed: int = 0) -> Inputs:
    """One row, whose padding is NaN."""
    inputs = make_inputs(TOTAL, seed=seed).without_padding()
    return Inputs(*(x[:1] for x in inputs[:4]), (PROTEIN_L >= 0)[None]).with_padding(torch.nan)


def context_of(inputs: Inputs, *, causal: bool = False) -> Context:
    return Context(inputs.hidden_BLD, inputs.mask_BL, causal)


def across(mechanism: Attention, inputs: Inputs, *, later: bool, own: bool) -> Tensor:
    view = View(BOUNDS, later)
    return mechanism.across(inputs[:3], context_of(inputs), view, own=own)[0]


def family(mechanism: Attention, inputs: Inputs, view: View, *, causal: bool = False) -> Any:
    return mechanism.forward_family(inputs[:3], context_of(inputs, causal=causal), view)


def piece(inputs: Inputs, start: int, end: int) -> Inputs:
    heads = [x[..., start:end, :] for x in inputs[:4]]
    return Inputs(*heads, inputs.mask_BL[:, start:end])


@pytest.mark.parametrize(("later", "own"), [(False, True), (False, False), (True, False)])
def test_relatives_are_seen_as_by_the_reference(across_case, later, own):
    mechanism, inputs = across_case.create().double(), joined().differentiable()
    if later and across_case.name == "softmax":
        assert mechanism.relatives_refusal(later=True, apart=True, runs=False)
        return
    found = across(mechanism, inputs, later=later, own=own)
    clean = inputs.with_padding(0).differentiable()
    exact = across_case.expected(mechanism, clean, causal=False, sees_LL=sees(later=later, own=own))
    torch.testing.assert_close(
        [found, *gradients(found, inputs, mechanism)],
        [exact, *gradients(exact, clean, mechanism)],
        rtol=1e-10,
        atol=1e-10,
    )
    assert not found[:, :, TOTAL - 9 :].any()


def test_a_state_that_enters_is_what_was_before_in_the_row(across_case, causal):
    mechanism, inputs = across_case.create().double(), joined()
    start, border, end = 79, 144, 175
    with torch.no_grad():
        whole, _ = family(mechanism, inputs, View(BOUNDS, False), causal=causal)
        one = Bounds.of([(0, 65)], (1, 65), longest=65, families=[1])
        read = piece(inputs, start, border)
        _, state = family(mechanism, read, View(one, False, keeps=True), causal=causal)
        two = Bounds.of([(0, 30), (30, 31)], (1, 31), longest=30, families=[2])
        left = piece(inputs, border, end)
        out, last = family(
            mechanism, left, View(two, False, entering=state, keeps=True), causal=causal
        )
        torch.testing.assert_close(out, whole[:, :, border:end], rtol=1e-12, atol=1e-12)
        # The state after all proteins, read at once.
        three = Bounds.of([(0, 65), (65, 95), (95, 96)], (1, 96), longest=65, families=[3])
        view = View(three, False, keeps=True)
        _, at_once = family(mechanism, piece(inputs, start, end), view, causal=causal)
    torch.testing.assert_close(parts(last), parts(at_once), rtol=1e-12, atol=1e-12)


def parts(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    return [x for x in vars(state).values() if isinstance(x, Tensor)]


@pytest.mark.parametrize(
    ("changed", "same"), [(slice(72), slice(72, 175)), (slice(144, 175), slice(144))]
)
def test_neither_another_family_nor_a_later_protein_is_seen(across_case, changed, same):
    """Not even by rounding; the queries of these are NaN."""
    mechanism, inputs = across_case.create().double(), joined()
    before = across(mechanism, inputs, later=False, own=True)
    others = [x.clone() for x in inputs[:4]]
    for x, factor in zip(others, (torch.nan, 1e3, 1e3, 1e3), strict=True):
        x[..., changed, :] *= factor
    after = across(mechanism, Inputs(*others, inputs.mask_BL), later=False, own=True)
    assert torch.equal(after[:, :, same], before[:, :, same])


def test_a_decay_counts_within_the_protein():
    case, plain = (find_case("performer_relu", decay=name) for name in ("learned", "none"))
    mechanism, inputs = case.create().double(), joined()
    assert "relatives_sum=apart" in mechanism.relatives_refusal(later=True, apart=False, runs=False)
    assert not mechanism.relatives_refusal(later=True, apart=True, runs=False)
    factor_H = torch.tensor([0.5, -2.0], dtype=torch.float64)
    found, _ = family(mechanism, inputs, View(BOUNDS, True, factor_H))
    own = inputs.run(mechanism, causal=False, bounds=BOUNDS)
    clean, twin = inputs.with_padding(0), plain.create().double()
    others = plain.expected(twin, clean, causal=False, sees_LL=sees(later=True, own=False))
    torch.testing.assert_close(found, own + factor_H[:, None, None] * others)
    nothing, _ = family(mechanism, inputs, View(BOUNDS, True, torch.zeros(2)))
    assert torch.equal(nothing, own)


@pytest.mark.parametrize("factor", [None, 0.5])
@pytest.mark.parametrize("later", [False, True])
def test_linear_heads_of_a_hybrid_see_the_family_and_windows_the_protein(later, factor):
    case = find_case("hybrid", window=4)
    mechanism, two = case.create(num_heads=3).double(), joined()
    inputs = Inputs(*(x.repeat(1, 2, 1, 1)[:, :3] for x in two[:3]), *two[3:])
    assert isinstance(mechanism, Hybrid)
    factor_H = None if factor is None else torch.full((3,), factor)
    view = View(BOUNDS, later, factor_H, keeps=not later)
    found, state = family(mechanism, inputs, view)
    near, far = (
        Inputs(*(x[:, heads] for x in inputs[:3]), *inputs[3:])
        for heads in (slice(0, 1), slice(1, None))
    )
    window = near.run(mechanism.near, causal=False, bounds=BOUNDS)
    linear, left = family(
        mechanism.linear, far, view._replace(factor_H=None if factor is None else factor_H[1:])
    )
    assert torch.equal(found, torch.cat([window, linear], dim=1))
    assert later or (state.window is None and torch.equal(state.linear, left))


def test_errors_in_bfloat16_are_within_the_bound_of_the_contract(across_case):
    mechanism, exact = across_case.create(), across_case.create().double()
    inputs = joined().to(torch.bfloat16)
    clean = inputs.to(torch.float64).with_padding(0)
    found = across(mechanism, inputs, later=False, own=True)
    expected = across_case.expected(exact, clean, causal=False, sees_LL=sees(later=False, own=True))
    assert found.dtype == torch.bfloat16
    assert relative_error(found, expected) <= 2e-2


@pytest.mark.parametrize(
    ("name", "options", "later", "words"),
    [
        ("softmax", {}, True, "model.relatives_sum=joint"),
        ("rfa", {"gate": True}, False, "omit gate=true"),
        ("hybrid", {"mechanism": "performer_relu", "options": {"decay": "learned"}}, False, ""),
    ],
)
def test_what_cannot_see_relatives_is_refused(name, options, later, words):
    mechanism = Case(name, find_case(name, **options).options, find_case(name).reference).create(
        num_heads=2
    )
    refused = mechanism.relatives_refusal(later=later, apart=name == "softmax", runs=False)
    assert words in refused and refused
