"""Batches: complete, identical for any number of ranks, resumable; curricula and forecasts."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from protlm.data.batching import plan as module
from protlm.data.batching.mixture import SampleOrder
from protlm.data.batching.plan import BatchStream, Curriculum, Progress, RankSlice, forecast
from protlm.data.batching.strategies import LengthBuckets, Packing
from protlm.system.errors import UserError

NUM_SAMPLES = 150
# Clusters have twice as many sequences, and an epoch as many samples.
LENGTHS = np.random.default_rng(0).integers(1, 300, 2 * NUM_SAMPLES)
STAGES = Curriculum([[0, 32], [70, 64], [200, 128]])
RULES = {
    "sequences": LengthBuckets(1_000, 128, window=32),
    "concatenated": Packing(300, 128, window=32),
    "one row to a batch": Packing(50, 128, window=10),
    "sequences, growing": LengthBuckets(1_000, 128, window=32, curriculum=STAGES),
    "concatenated, growing": Packing(300, 128, window=32, curriculum=STAGES),
}
MANY = np.random.default_rng(0).integers(1, 300, 5_000)
MANY_ORDER = SampleOrder([len(MANY)], seed=1)
BUCKETS = LengthBuckets(4_000, 128, window=1_000)


class Pairs:
    """Clusters of two sequences, the one beside the other."""

    def __init__(self, num_clusters):
        self._size = num_clusters

    def __len__(self):
        return self._size

    def members(self, clusters, starts, turn):
        return 2 * clusters + (starts.astype(np.int64) + turn) % 2


ORDERS = {
    "one": SampleOrder([NUM_SAMPLES], seed=3),
    "mixture": SampleOrder([100, 45, 5], shares=[5, 4, 2], seed=3),
    "clusters": SampleOrder([300], seed=3, clusters=[Pairs(150)]),
    "mixture of clusters": SampleOrder(
        [220, 80], shares=[5, 4], seed=3, clusters=[Pairs(110), Pairs(40)]
    ),
}


@pytest.fixture(params=RULES)
def rule(request):
    return RULES[request.param]


@pytest.fixture(params=ORDERS)
def order(request):
    return ORDERS[request.param]


def stream(order, rule, **options):
    return BatchStream(LENGTHS.take, order, rule, **options)


@pytest.mark.parametrize("world_size", [2, 7])
def test_global_batches_are_the_same_for_any_number_of_ranks(order, rule, world_size):
    whole = list(stream(order, rule, num_batches=40))
    ranks = [
        list(stream(order, rule, num_batches=40, share=RankSlice(rank, world_size)))
        for rank in range(world_size)
    ]
    for step, plan in enumerate(whole):
        parts = [rank[step] for rank in ranks]
        assert {(part.length, part.after, len(part.rows)) for part in parts} == {
            (plan.length, plan.after, -(-len(plan.rows) // world_size))
        }
        rows = [row for rows in zip(*(part.rows for part in parts), strict=True) for row in rows]
        assert tuple(rows[: len(plan.rows)]) == plan.rows
        assert set(rows[len(plan.rows) :]) <= {None}


def test_resuming_from_every_progress_gives_the_tail(order, rule):
    total = len(stream(order, rule)) + 10
    plans = list(stream(order, rule, num_batches=total))
    assert plans[-1].after.epoch >= 1
    for done, plan in enumerate(plans, start=1):
        rest = stream(order, rule, start=plan.after, num_batches=total, done=done)
        assert len(rest) == total
        assert list(islice(rest, 3)) == plans[done : done + 3]


@pytest.mark.parametrize("share", [RankSlice(), RankSlice(1, 3), RankSlice(0, 2, parts=3)], ids=str)
@pytest.mark.parametrize("batches_per_step", [1, 3])
def test_batches_have_the_number_of_their_step(order, rule, share, batches_per_step):
    """The same on all ranks and for all parts of a batch, wherever the run was resumed."""
    share = replace(share, batches_per_step=batches_per_step)
    plans = list(stream(order, rule, num_batches=12, share=share))
    expected = [batch // batches_per_step for batch in range(12) for _ in range(share.parts)]
    assert [plan.step for plan in plans] == expected
    for done in range(0, 12, batches_per_step):
        start = plans[done * share.parts - 1].after if done else Progress()
        rest = stream(order, rule, start=start, num_batches=12, done=done, share=share)
        assert list(rest) == plans[done * share.parts :]


def test_progress_grows_and_ends_with_the_epoch(order, rule):
    plans = list(stream(order, rule))
    places = [plan.after for plan in plans]
    assert places == sorted(set(places))
    assert places[-1] == Progress(1, 0)
    assert all(place < Progress(1, 0) for place in places[:-1])
    assert len(stream(order, rule)) == len(plans)


def test_one_epoch_can_be_resumed_and_its_end_is_empty(order, rule):
    plans = list(stream(order, rule))
    half = stream(order, rule, start=plans[7].after)
    assert list(half) == plans[8:] != []
    assert len(half) == len(plans)
    assert list(stream(order, rule, start=Progress(0, len(order)))) == []


def test_a_stream_can_be_iterated_again(order, rule):
    batches = stream(order, rule)
    assert list(batches) == list(batches)


def test_epochs_and_seeds_differ_and_repeat(rule):
    def rows(seed, epoch):
        order = SampleOrder([NUM_SAMPLES], seed=seed)
        return [plan.rows for plan in stream(order, rule, start=Progress(epoch))]

    assert rows(3, 0) == rows(3, 0)
    assert rows(3, 0) != rows(3, 1)
    assert rows(3, 0) != rows(4, 0)


def test_a_position_inside_a_batch_is_rejected(order):
    first = next(p.after for p in stream(order, RULES["sequences"]) if len(p.rows) > 1)
    second = list(stream(order, RULES["concatenated"]))[1].after
    assert second.tokens
    for rule, inside in (
        ("sequences", Progress(0, first.samples - 1)),
        ("concatenated", Progress(0, second.samples, second.tokens - 1)),
    ):
        with pytest.raises(UserError, match=r"another version of protlm.*run_dir="):
            list(stream(order, RULES[rule], start=inside))


def test_only_the_current_window_is_read(order, rule):
    asked = []

    def lengths_of(samples):
        asked.append(len(samples))
        return LENGTHS.take(samples)

    place = Progress(10**6, 3 * rule.window)
    batches = BatchStream(lengths_of, order, rule, num_batches=10**9, start=place)
    assert len(batches) == 10**9
    assert asked == []
    assert next(iter(batches)).after.epoch >= 10**6
    assert asked == [rule.window]


@pytest.mark.parametrize("rule_of", [LengthBuckets, Packing])
def test_a_window_has_as_many_batches_whatever_their_size(rule_of):
    sizes = [rule_of(tokens, 1_024).window_size for tokens in (1, 131_072, 131_073, 2**21)]
    assert sizes == [16_384, 16_384, 32_768, 2**18]
    assert rule_of(2**21, 1_024, window=7).window_size == 7


def test_a_curriculum_applies_from_the_start_of_a_window():
    order = ORDERS["one"]
    for mode in ("sequences", "concatenated"):
        grown, growing = RULES[mode], RULES[f"{mode}, growing"]
        seen = {}
        plans = list(stream(order, growing, num_batches=3 * len(stream(order, growing))))
        for plan, before in zip(plans, [Progress(), *(p.after for p in plans)], strict=False):
            samples = before.epoch * len(order) + before.samples // growing.window * growing.window
            seen[samples] = max(seen.get(samples, 0), plan.length)
        expected = {s: STAGES.max_length(s) for s in seen}
        assert seen == expected
        assert set(expected.values()) == {32, 64, 128}
        # After the last stage, batches equal those without a curriculum.
        late = Progress(2)
        one, other = (stream(order, r, start=late, num_batches=100) for r in (grown, growing))
        assert list(one) == list(other)


@pytest.mark.parametrize("rule_of", [LengthBuckets, Packing])
@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens_per_batch": 0},
        {"max_length": 2},
        {"window": 0},
        {"curriculum": Curriculum([[0, 64], [10, 129]])},
    ],
)
def test_invalid_rules_are_rejected(rule_of, wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        rule_of(**({"tokens_per_batch": 1_000, "max_length": 128} | wrong))


def test_a_length_applies_from_its_number_of_samples_on():
    curriculum = Curriculum([[0, 256], [1_000, 512], [3_000, 1_024]])
    seen = [0, 999, 1_000, 2_999, 3_000, 10**12]
    assert [curriculum.max_length(n) for n in seen] == [256, 256, 512, 512, 1_024, 1_024]
    assert curriculum.describe() == (
        "rows of 256 tokens, 512 after 1,000 samples, 1024 after 3,000 samples"
    )


def test_without_stages_there_is_no_curriculum():
    assert Curriculum().max_length(0) is None
    assert Curriculum([]).describe() == ""
    Curriculum().check(3)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ([[5, 64]], "beginning with 0"),
        ([[0, 64], [10, 64]], "ascend"),
        ([[0, 64], [10, 32]], "ascend"),
        ([[0, 2]], "at least 3"),
        ([[0, 64], [20, 128], [20, 256]], "ascend"),
        ([[0, 64, 1]], "pairs"),
        ([[0]], "pairs"),
        ([[]], "pairs"),
    ],
)
def test_invalid_stages_are_rejected(wrong, words):
    with pytest.raises(UserError, match=words):
        Curriculum(wrong)


def test_a_length_above_that_of_the_rows_is_rejected():
    Curriculum([[0, 64], [10, 128]]).check(128)
    with pytest.raises(UserError, match=r"data\.max_length=128"):
        Curriculum([[0, 64], [10, 128]]).check(127)


def test_cropping_is_counted():
    found = forecast(MANY.take, MANY_ORDER, BUCKETS)
    left_out = np.maximum(MANY + 2 - 128, 0)
    assert (found.cropped, found.left_out) == ((left_out > 0).sum(), left_out.sum())
    assert found.is_exact
    assert f"{found.cropped:,} cropped ({found.left_out:,} residues)" in found.describe()
    assert "about" not in found.describe()


def test_for_large_data_sets_only_one_window_is_read(monkeypatch):
    monkeypatch.setattr(module, "_MAX_EXACT", 4_999)
    asked = []

    def lengths_of(samples):
        asked.extend(samples.tolist())
        return MANY.take(samples)

    found = forecast(lengths_of, MANY_ORDER, BUCKETS)
    assert len(set(asked)) == BUCKETS.window
    left_out = np.maximum(MANY + 2 - 128, 0)
    assert found.cropped == pytest.approx((left_out > 0).sum(), rel=0.1)
    assert found.left_out == pytest.approx(left_out.sum(), rel=0.1)
    assert found.describe().startswith("about ")


def test_what_fits_is_not_mentioned():
    text = forecast(MANY.take, MANY_ORDER, LengthBuckets(4_000, 302)).describe()
    assert "cropped" not in text
    assert text.endswith("of the positions of a batch are padding")


def test_joined_sequences_have_hardly_any_padding():
    found = forecast(MANY.take, MANY_ORDER, Packing(4_096, 128, window=1_000))
    assert found.cropped == 0
    # Of a window's 1,000 rows and more, the last one is short.
    assert 0.999 < found.useful_fraction <= 1


@pytest.mark.parametrize("most", [5_000, 4_999])
def test_a_curriculum_crops_more(monkeypatch, most):
    """Half of the epoch has rows of 32 tokens, the rest rows of 128."""
    monkeypatch.setattr(module, "_MAX_EXACT", most)
    rule = LengthBuckets(4_000, 128, window=1_000, curriculum=Curriculum([[0, 32], [2_500, 128]]))
    found = forecast(MANY.take, MANY_ORDER, rule)
    drawn = MANY[MANY_ORDER.draw(0, np.arange(5_000)).samples]
    # A window has the length that holds at its beginning: the first three are short.
    left_out = np.maximum(drawn + 2 - np.repeat([32, 128], [3_000, 2_000]), 0)
    rel = 1e-9 if found.is_exact else 0.1
    assert found.cropped == pytest.approx(np.count_nonzero(left_out), rel=rel)
    assert found.left_out == pytest.approx(left_out.sum(), rel=rel)
    assert found.is_exact == (most == 5_000)
