"""The aligned window: exact softmax over the own window and what is near in each relative."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from protlm.attention.ops import aligned
from protlm.attention.ops.aligned import AlignedKeys, Sight, aligned_softmax, aligned_weights
from protlm.attention.ops.blocks import Window
from protlm.attention.ops.key_value_cache import KeyValueCache
from protlm.bounds import Bounds
from tests.attention.cases import LargestTensor, visible_softmax
from tests.attention.test_contract import relative_error
from tests.attention.test_cost import kept
from tests.rounding import condition_of, error_bound

# Lengths of the proteins of each family of each row.
ROWS = [[[1, 2, 63, 64, 65], [40]], [[65, 1, 64, 2, 63], [70, 9, 90]], [[3, 3]]]
LENGTH = 400
FULL, ORDERED, CAUSAL = (Window(8, 8), True), (Window(8, 8), False), (Window(16, 0), False)
MODES = {"full": FULL, "ordered": ORDERED, "causal": CAUSAL, "others": (None, False)}


def sights(around: int, *names: str) -> Any:
    """The sights of some modes, for a test of each."""
    rows = {name: MODES[name] for name in names or MODES}
    cases = [Sight(window, around, later) for window, later in rows.values()]
    return pytest.mark.parametrize("sight", cases, ids=list(rows))


@dataclass(frozen=True)
class Row:
    """Joined rows; of each position, the numbers of its family and protein, -1 at padding."""

    bounds: Bounds
    family_L: Tensor
    protein_L: Tensor
    position_L: Tensor

    @classmethod
    def of(cls, rows: Sequence[Sequence[Sequence[int]]], positions: str = "aligned") -> "Row":
        spans, sizes, number = list[tuple[int, int]](), list[int](), 0
        family_L, protein_L, position_L = torch.full((3, LENGTH * len(rows)), -1)
        for row, families in enumerate(rows):
            start = LENGTH * row
            for lengths in families:
                first = start
                for length in lengths:
                    place_M, there = torch.arange(length), slice(start, start + length)
                    # A shift, and an insertion of five residues at one column.
                    columns_M = place_M.clamp(max=7).maximum(place_M - 5) + 3 * number - 9
                    known = {"restart": place_M, "run": place_M + start - first}
                    position_L[there] = known.get(positions, columns_M)
                    family_L[there], protein_L[there] = len(sizes), number
                    spans.append((start, start + length))
                    start, number = start + length, number + 1
                sizes.append(len(lengths))
        places = position_L.numpy() if positions == "aligned" else None
        bounds = Bounds.of(
            spans,
            (len(rows), LENGTH),
            longest=90,
            families=sizes,
            running=positions == "run",
            aligned=places,
        )
        return cls(bounds, family_L, protein_L, position_L)

    def heads(self, *, padding: float = torch.nan, seed: int = 0) -> list[Tensor]:
        """Queries, keys and values, as a model has them: heads are next to each other."""
        generator, length = torch.Generator().manual_seed(seed), len(self.family_L)
        shapes = [(1, length, 2, width) for width in (6, 6, 5)]
        heads = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        is_padding_L1 = (self.family_L < 0)[:, None]
        return [x.transpose(1, 2).masked_fill(is_padding_L1, padding) for x in heads]

    def seen(self, sight: Sight) -> Tensor:
        """The definition: which keys each query sees, LL."""
        index_L = torch.arange(len(self.family_L))
        numbers = index_L, self.family_L, self.protein_L, self.position_L
        offset_LL, strange_LL, apart_LL, shift_LL = (x - x[:, None] for x in numbers)
        seen_LL = (apart_LL != 0) if sight.later else (apart_LL < 0)
        seen_LL = seen_LL & (shift_LL.abs() <= sight.around)
        if sight.window is not None:
            before, after = sight.window.before, sight.window.after
            seen_LL |= (apart_LL == 0) & (offset_LL >= -before) & (offset_LL <= after)
        return seen_LL & (strange_LL == 0) & (self.family_L >= 0)[:, None]

    def run(self, heads: Sequence[Tensor], sight: Sight) -> Tensor:
        return aligned_softmax(*heads, bounds=self.bounds, sight=sight)

    def expected(self, heads: Sequence[Tensor], sight: Sight) -> Tensor:
        q, k, v = (x.where((self.family_L >= 0)[:, None], 0) for x in heads)
        return visible_softmax(q @ k.mT / q.shape[-1] ** 0.5, self.seen(sight)) @ v

    def gradients(self, heads: Sequence[Tensor], sight: Sight, name: str = "run") -> list[Tensor]:
        """The output and the gradients of queries, keys and values, by `run` or `expected`."""
        leaves = [x.detach().requires_grad_() for x in heads]
        out = getattr(self, name)(leaves, sight)
        cotangent = self.heads(padding=1.0, seed=9)[2].to(out.dtype)
        return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


def set_tiles(monkeypatch: pytest.MonkeyPatch, queries: int, keys: int) -> None:
    monkeypatch.setattr(aligned, "_QUERIES", queries)
    monkeypatch.setattr(aligned, "_KEYS", keys)


@pytest.mark.parametrize(
    ("around", "positions", "sizes"),
    [
        (0, "restart", (128, 4096)),
        (0, "aligned", (16, 20)),
        (3, "run", (16, 20)),
        (16, "restart", (16, 20)),
        (16, "aligned", (128, 4096)),
        (16, "run", (128, 20)),
        (1000, "aligned", (16, 4096)),
    ],
)
@sights(0)
def test_outputs_and_gradients_are_those_of_the_definition(
    sight, around, positions, sizes, monkeypatch
):
    set_tiles(monkeypatch, *sizes)
    row, sight = Row.of(ROWS, positions), sight._replace(around=around)
    results = [row.gradients(row.heads(), sight, name) for name in ("run", "expected")]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@sights(16)
def test_no_family_sees_another(sight):
    """Not even NaN, or by rounding what is 30 times as large."""
    row, results = Row.of(ROWS), []
    own = row.family_L == 2
    for factor in (1, 30, torch.nan):
        heads = [x.where(own[:, None], factor * x) for x in row.heads()]
        results.append([x[:, :, own] for x in row.gradients(heads, sight)])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


@sights(16, "ordered", "causal", "others")
def test_no_protein_sees_a_later_one(sight):
    row = Row.of(ROWS)
    heads, first = row.heads(), row.protein_L < 9
    later = [x.where(first[:, None], 30 * x) for x in heads]
    outs = [row.run(x, sight)[:, :, first] for x in (heads, later)]
    torch.testing.assert_close(*outs, rtol=0, atol=0)


@sights(3)
def test_weights_times_values_are_outputs(sight):
    row = Row.of(ROWS)
    (q, k, v), mask_1L = row.heads(), row.family_L[None] >= 0
    given = {"mask_1L": mask_1L, "bounds": row.bounds, "sight": sight}
    weights = [aligned_weights(q, k, **given, rows=slice(n, n + 400)) for n in (0, 400, 800)]
    expected = row.run((q, k, v), sight)
    assert relative_error(torch.cat(weights, dim=2) @ v.nan_to_num(), expected) <= 1e-12
    seen_LL = row.seen(sight)
    assert not torch.cat(weights, dim=2).masked_select(~seen_LL).any()


CONTEXT, QUERIES = [1, 63, 2, 64, 65], [50, 17, 40]


def read(row: Row, heads: Sequence[Tensor]) -> AlignedKeys:
    """Reads the context of a row in two pieces."""
    (_, k, v), state = heads, AlignedKeys.empty(heads[1][:, :, 0], heads[2][:, :, 0])
    spans, cuts = row.bounds.spans[: len(CONTEXT)].tolist(), (0, 3, len(CONTEXT))
    for first, last in pairwise(cuts):
        start, end = spans[first][0], spans[last - 1][1]
        shifted = [(a - start, b - start) for a, b in spans[first:last]]
        bounds = Bounds.of(
            shifted,
            (1, end - start),
            longest=90,
            families=[last - first],
            aligned=row.position_L[start:end].numpy(),
        )
        state = state.extended(k[:, :, start:end], v[:, :, start:end], bounds)
    return state


@pytest.mark.parametrize("around", [0, 16, 1000])
@sights(0, "ordered", "causal", "others")
def test_a_context_that_was_read_before_is_as_in_one_row(sight, around):
    sight = sight._replace(around=around)
    asked = Row.of([[[length] for length in QUERIES]])
    context, queries = Row.of([[CONTEXT]]), asked.heads()
    heads = context.heads(seed=1)
    state = read(context, heads)
    assert state.position_1M.diff().ge(0).all() and state[torch.tensor([0, 0])] is state
    found = aligned_softmax(*queries, bounds=asked.bounds, sight=sight, entering=state)
    for start, end in asked.bounds.spans.tolist():
        whole = Row.of([[[*CONTEXT, end - start]]])
        spot = slice(sum(CONTEXT), sum(CONTEXT) + end - start)
        whole.position_L[spot] = asked.position_L[start:end]
        joined = [x.clone() for x in heads]
        for x, y in zip(joined, queries, strict=True):
            x[:, :, spot] = y[:, :, start:end]
        expected = whole.expected(joined, sight)[:, :, spot]
        assert relative_error(found[:, :, start:end], expected) <= 1e-12
    assert not found[:, :, sum(QUERIES) :].any()


def test_steps_are_as_the_row():
    asked, context, window = Row.of([[[40]]] * 3, "restart"), Row.of([[CONTEXT]]), 16
    queries, sight = asked.heads(), Sight(Window(window, 0), 3, later=False)
    state = read(context, context.heads(seed=1))
    expected = aligned_softmax(*queries, bounds=asked.bounds, sight=sight, entering=state)
    q, k, v = (x[0].unflatten(1, (3, LENGTH)).transpose(0, 1) for x in queries)
    expected = expected[0].unflatten(1, (3, LENGTH)).transpose(0, 1)
    cache, rows = KeyValueCache.empty(k[:, :, 0], v[:, :, 0], window + 1), torch.arange(3)
    for step in range(40):
        if step == 20:
            kept_rows = torch.tensor([2, 0])
            cache, state, rows = cache[kept_rows], state[kept_rows], rows[kept_rows]
        cache = cache.append(k[rows, :, step], v[rows, :, step], slot=cache.ring_slot())
        found = state.step(cache, q[rows, :, step], around=sight.around)
        assert relative_error(found, expected[rows, :, step]) <= 1e-12


@sights(16)
def test_errors_in_bfloat16_are_those_of_its_rounding(sight):
    row = Row.of(ROWS)
    clean = [x.bfloat16().double() for x in row.heads(padding=0)]
    exact = row.gradients(clean, sight)
    conditions = condition_of(lambda *heads: row.gradients(heads, sight, "expected"), clean)
    found = row.gradients([x.bfloat16() for x in clean], sight)
    assert {x.dtype for x in found} == {torch.bfloat16}
    for x, y, condition in zip(found, exact, conditions, strict=True):
        # Outputs are rounded before gradients are made of them, which are rounded too.
        assert relative_error(x, y) <= error_bound(torch.bfloat16, condition, 1)


@pytest.mark.slow
@sights(16)
def test_memory_grows_with_the_length_only(sight, monkeypatch):
    set_tiles(monkeypatch, 32, 64)
    largest, stored = [], []
    for number in (8, 16):
        spans = [(50 * n, 50 * n + 50) for n in range(number)]
        bounds = Bounds.of(spans, (1, 50 * number), longest=50, families=[number])
        leaves = [torch.randn(1, 2, 50 * number, 8, requires_grad=True) for _ in range(3)]
        with LargestTensor() as tensors, kept() as saved:
            out = aligned_softmax(*leaves, bounds=bounds, sight=sight)
        with tensors:
            out.square().sum().backward()
        largest.append(tensors.numel / leaves[0].numel())
        stored.append(sum(saved.values()) / leaves[0].numel())
    # Values beside sums of weights; queries, keys, values, outputs and the sums of exponentials.
    assert max(largest) <= 9 / 8 and max(stored) <= 4 + 1 / 8
