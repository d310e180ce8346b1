"""Packed proteins: each as it is alone, in outputs and gradients, whatever its neighbors are."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from protlm.attention import Attention
from protlm.attention.ops import varlen
from protlm.attention.ops.blocks import Window
from protlm.attention.ops.numerics import visible_softmax
from protlm.bounds import Bounds, most_proteins
from tests.attention.cases import HAS_FAR_KEYS, Inputs, find_case, make_inputs
from tests.attention.test_contract import gradients, relative_error

pytestmark = pytest.mark.contract
# Two rows with padding behind their proteins, and one of a single token.
SHAPE, LONGEST = (3, 160), 90
LENGTHS = [[63, 5, 1, 70], [64, 90], [1]]
SPANS = [
    (160 * row + sum(lengths[:n]), 160 * row + sum(lengths[: n + 1]))
    for row, lengths in enumerate(LENGTHS)
    for n in range(len(lengths))
]
BOUNDS = Bounds.of(SPANS, SHAPE, longest=LONGEST)
TOTAL = SHAPE[0] * SHAPE[1]


def joined(seed: int = 0, **sizes: int) -> Inputs:
    """The rows of `SHAPE`, joined to one; all padding is NaN."""
    inputs = make_inputs(TOTAL, seed=seed, **sizes).without_padding()
    mask_1L = torch.zeros(1, TOTAL, dtype=torch.bool)
    for start, end in SPANS:
        mask_1L[:, start:end] = True
    return Inputs(*(x[:1] for x in inputs[:4]), mask_1L).with_padding(torch.nan)


def run(mechanism: Attention, inputs: Inputs, *, causal: bool) -> Tensor:
    return inputs.run(mechanism, causal=causal, bounds=BOUNDS)


def one_by_one(mechanism: Attention, inputs: Inputs, *, causal: bool) -> Tensor:
    """The outputs of each protein alone."""
    parts: list[Tensor] = []
    end = 0
    for start, stop in [*SPANS, (TOTAL, TOTAL)]:
        parts.append(torch.zeros_like(inputs.v_BHLC[:, :, end:start]))
        end = stop
        if start < stop:
            alone = Inputs(
                *(x[..., start:stop, :] for x in inputs[:4]), inputs.mask_BL[:, start:stop]
            )
            parts.append(alone.run(mechanism, causal=causal))
    return torch.cat(parts, dim=2)


def test_a_packed_protein_is_as_it_is_alone(case, causal):
    mechanism, inputs = case.create().double(), joined().differentiable()
    results = []
    for compute in (run, one_by_one):
        out = compute(mechanism, inputs, causal=causal)
        results.append([out, *gradients(out, inputs, mechanism)])
    for found, expected in zip(*results, strict=True):
        assert found.isfinite().all()
        # Sums of a few hundred numbers, in another order.
        assert relative_error(found, expected) <= 1e-12


@pytest.mark.slow
def test_errors_in_bfloat16_are_within_the_bound_of_the_contract(case, causal):
    """Or those of the proteins alone, where the gradients of few parameters cancel."""
    clean = joined().to(torch.bfloat16).to(torch.float64).differentiable()
    exact, results = case.create().double(), []
    expected = one_by_one(exact, clean, causal=causal)
    wanted = [expected, *gradients(expected, clean, exact)]
    for compute in (run, one_by_one):
        mechanism, inputs = case.create(), clean.to(torch.bfloat16).differentiable()
        out = compute(mechanism, inputs, causal=causal)
        assert out.dtype == torch.bfloat16
        found = [out, *gradients(out, inputs, mechanism)]
        results.append([relative_error(x, y) for x, y in zip(found, wanted, strict=True)])
    for packed, alone in zip(*results, strict=True):
        assert packed <= max(1e-2, 1.1 * alone)


@HAS_FAR_KEYS
def test_no_protein_sees_its_neighbors(case, causal):
    """Not even by rounding: they are 30 times other numbers."""
    mechanism, (start, end), results = case.create(), SPANS[3], []
    for scale, seed in ((1, 0), (30, 9)):
        inputs, own = joined(seed).to(torch.float32), joined().to(torch.float32)
        mixed = [scale * x for x in inputs[:4]]
        for x, y in zip(mixed, own[:4], strict=True):
            x[..., start:end, :] = y[..., start:end, :]
        changed = Inputs(*mixed, own.mask_BL).differentiable()
        out = run(mechanism, changed, causal=causal)[:, :, start:end]
        found = torch.autograd.grad(out.square().sum(), changed[:4], materialize_grads=True)
        results.append([out, *(x[..., start:end, :] for x in found)])
        assert not any(x[..., :start, :].any() for x in found)
    torch.testing.assert_close(*results, rtol=0, atol=0)


def by_mask(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, *rest: object, scale: float, window_size: tuple
) -> Tensor:
    """What the kernel of torch computes of (L, H, K), as one matrix of all pairs."""
    number_L = torch.bucketize(torch.arange(len(q)), ends[1:].long(), right=True)
    before, after = (TOTAL if side < 0 else side for side in window_size)
    place_L = torch.arange(len(q))
    visible = Window(before, after).sees(place_L - place_L[:, None])
    visible = visible & (number_L[:, None] == number_L)
    q, k, v = (x.transpose(0, 1).float() for x in (q, k, v))
    return (visible_softmax(scale * q @ k.mT, visible) @ v).transpose(0, 1).bfloat16()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, look_at) -> list[tuple]:
    """Calls of a kernel in place of that of torch, which runs on a GPU alone."""
    calls: list[tuple] = []
    monkeypatch.setattr(varlen, "varlen_attn", by_mask)
    look_at(varlen, "varlen_attn", lambda *given, **_: calls.append(given))
    monkeypatch.setattr(varlen, "_is_card", lambda device: True)
    return calls


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("name", "options"), [("softmax", {}), ("window", {"window": 16})])
def test_a_gpu_takes_the_kernel_of_torch(name, options, causal, kernel):
    case, inputs = find_case(name, **options), joined().to(torch.bfloat16)
    # Norms leave queries and keys in float32.
    mixed = inputs._replace(q_BHLK=inputs.q_BHLK.float(), k_BHLK=inputs.k_BHLK.float())
    out = run(case.create(), mixed, causal=causal)
    exact = one_by_one(case.create().double(), inputs.to(torch.float64), causal=causal)
    assert relative_error(out, exact) <= 1e-2
    ((*_, ends, same, most, longest),) = kernel
    assert (most, longest, ends.dtype) == (LONGEST, LONGEST, torch.int32) and same is ends
    # The kernel has no float32.
    run(case.create(), inputs.to(torch.float32), causal=causal)
    assert len(kernel) == 1


def test_bounds_are_those_of_all_positions_in_one_size():
    ends, segment_L, position_L, spans, _, families = BOUNDS
    assert families is None
    assert ends[0] == 0 and ends[-1] == TOTAL and ends.diff().max() == LONGEST
    assert {tuple(span) for span in spans} <= {(int(a), int(b)) for a, b in pairwise(ends)}
    assert torch.equal(segment_L, torch.arange(len(ends) - 1).repeat_interleave(ends.diff()))
    assert torch.equal(position_L + ends[segment_L], torch.arange(TOTAL))
    most = [(160 * row + 3 * n, 160 * row + 3 * n + 3) for row in range(3) for n in range(10)]
    assert most_proteins(160) == 10
    for some in (most, most[::10]):
        assert len(Bounds.of(some, SHAPE, longest=LONGEST).cu_seqlens) == len(ends)


def test_families_are_bounds_of_the_spans_of_their_proteins():
    below = Bounds.of(SPANS, SHAPE, longest=LONGEST, families=[3, 1, 2, 1])
    torch.testing.assert_close(below[:3], BOUNDS[:3], rtol=0, atol=0)
    families = below.families
    assert families is not None and families.spans.tolist() == [
        [0, 69],
        [69, 139],
        [160, 314],
        [320, 321],
    ]
    assert families.longest == 160 and families.families is None
    assert torch.equal(families.position_L, below.position_L)
    assert [families.segment_L[n].item() for n in (0, 68, 69, 138, 139, 313)] == [0, 0, 1, 1, 2, 3]
