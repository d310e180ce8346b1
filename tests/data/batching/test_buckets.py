"""Length buckets: every sequence once, in batches of similar length."""

from itertools import chain

import numpy as np
import pytest

from protlm.data.batching.mixture import SampleOrder
from protlm.data.batching.plan import BatchStream, Curriculum, Progress, forecast
from protlm.data.batching.strategies import LengthBuckets
from protlm.data.records import Tally, read_records
from protlm.system.errors import UserError
from protlm.system.paths import sample_dir

LENGTHS = np.random.default_rng(0).integers(1, 300, 500)
RULE = LengthBuckets(1_000, 128, window=64)


def plans_of(rule=RULE, *, epoch=0, shuffle=True):
    order = SampleOrder([len(LENGTHS)], seed=3, shuffle=shuffle)
    return list(BatchStream(LENGTHS.take, order, rule, start=Progress(epoch)))


def samples(plan):
    return [row.sample for row in plan.rows]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("window", [1, 64, 499, 500, 10_000])
def test_an_epoch_has_every_sample_once(shuffle, window):
    plans = plans_of(LengthBuckets(1_000, 128, window=window), shuffle=shuffle)
    assert sorted(chain.from_iterable(map(samples, plans))) == list(range(len(LENGTHS)))


def test_batches_keep_to_the_budget_and_fit_their_samples():
    for plan in plans_of():
        longest = min(LENGTHS[samples(plan)].max() + 2, RULE.max_length)
        # No smaller edge would do.
        assert plan.length == RULE.edges[np.searchsorted(RULE.edges, longest)]
        assert len(plan.rows) * plan.length <= RULE.tokens_per_batch


def test_a_row_over_the_budget_is_a_separate_batch():
    assert {len(plan.rows) for plan in plans_of(LengthBuckets(50, 400))} == {1}


def test_only_the_last_batch_of_a_window_is_far_below_the_budget():
    short = [p for p in plans_of() if (len(p.rows) + 1) * p.length <= RULE.tokens_per_batch]
    assert len(short) <= -(-len(LENGTHS) // RULE.window)


def test_batches_do_not_come_in_the_order_of_their_lengths():
    steps = np.diff([plan.length for plan in plans_of()])
    assert (steps > 0).sum() > len(steps) / 5
    assert (steps < 0).sum() > len(steps) / 5


def test_batches_are_shuffled_differently_in_each_epoch():
    # One window, so that the batches of all epochs have the same lengths.
    rule = LengthBuckets(1_000, 128, window=1_000)
    one, other = ([plan.length for plan in plans_of(rule, epoch=epoch)] for epoch in (0, 1))
    assert sorted(one) == sorted(other)
    assert one != other


def test_rows_are_cropped_by_their_own_setting():
    stages = Curriculum([[0, 20], [200, 100]])
    rule = LengthBuckets(1_000, 128, window=100, crop="random", curriculum=stages)
    plans = plans_of(rule)
    assert {(row.max_length, row.crop) for plan in plans for row in plan.rows} == {
        (20, "random"),
        (100, "random"),
    }
    assert max(plan.length for plan in plans) == 100


@pytest.mark.parametrize("max_length", [3, 16, 63, 64, 65, 1_000, 8_192])
def test_edges_are_ascending_up_to_the_maximum(max_length):
    edges = LengthBuckets(1, max_length).edges
    assert edges[-1] == max_length
    assert (np.diff(edges) > 0).all()
    # Few shapes to compile: sixteen to a doubling.
    assert len(edges) <= 16 * 8 + 1


def test_edges_can_be_given():
    rule = LengthBuckets(2_000, 100, bucket_edges=(50, 100))
    assert {plan.length for plan in plans_of(rule)} == {50, 100}


@pytest.mark.parametrize(
    "wrong",
    [
        {"bucket_edges": ()},
        {"bucket_edges": (64, 64, 128)},
        {"bucket_edges": (64, 100)},
        {"crop": "middle"},
    ],
)
def test_invalid_settings_are_rejected(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        LengthBuckets(1_000, 128, **wrong)


@pytest.mark.parametrize("tokens_per_batch", [8_192, 16_384, 65_536, 131_072])
def test_at_most_5_percent_of_the_sample_s_batches_is_padding(tokens_per_batch):
    path = sample_dir() / "uniprot_sample.fasta.gz"
    lengths = np.array([len(record.sequence) for record in read_records(path, Tally())])
    rule = LengthBuckets(tokens_per_batch, 1_024)
    order = SampleOrder([len(lengths)])
    padded = sum(len(plan.rows) * plan.length for plan in BatchStream(lengths.take, order, rule))
    share = np.minimum(lengths + 2, 1_024).sum() / padded
    assert 0.95 <= share <= 1
    # What is said at the start of training is this: the sample is one window.
    assert forecast(lengths.take, order, rule).useful_fraction == share
