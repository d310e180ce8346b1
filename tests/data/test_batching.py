"""Batches: nothing dropped, the same for any number of ranks, resumed from any place."""

from itertools import islice

import numpy as np
import pytest

from protlm.data.batching import FILLER, BatchRule, BatchStream, Progress, useful_share
from protlm.data.records import Tally
from protlm.data.records.fasta import read_fasta
from protlm.errors import UserError
from protlm.paths import sample_dir

LENGTHS = np.random.default_rng(0).integers(1, 300, 500)
RULE = BatchRule(tokens_per_batch=1_000, max_length=128, window=64, seed=3)


def contents(plans):
    return [(p.epoch, p.samples.tolist(), p.length, p.after) for p in plans]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("window", [1, 64, 499, 500, 10_000])
def test_an_epoch_has_every_sample_once(shuffle, window):
    rule = BatchRule(tokens_per_batch=1_000, max_length=128, window=window, shuffle=shuffle)
    stream = BatchStream(LENGTHS, rule)
    plans = list(stream)
    assert sorted(np.concatenate([p.samples for p in plans]).tolist()) == list(range(len(LENGTHS)))
    assert len(stream) == len(plans)
    assert plans[-1].after == Progress(1, 0)


def test_batches_keep_to_the_budget_and_fit_their_samples():
    for plan in BatchStream(LENGTHS, RULE):
        tokens = np.minimum(LENGTHS[plan.samples] + 2, RULE.max_length)
        assert plan.length in RULE.edges
        assert tokens.max() <= plan.length
        # No smaller edge would do.
        assert RULE.edges[np.searchsorted(RULE.edges, tokens.max())] == plan.length
        assert len(plan.samples) * plan.length <= RULE.tokens_per_batch


def test_a_row_over_the_budget_is_a_batch_of_its_own():
    rule = BatchRule(tokens_per_batch=50, max_length=400)
    for plan in BatchStream(LENGTHS, rule):
        assert len(plan.samples) == 1


def test_only_the_last_batch_of_a_window_is_far_below_the_budget():
    plans = list(BatchStream(LENGTHS, RULE))
    short = [p for p in plans if (len(p.samples) + 1) * p.length <= RULE.tokens_per_batch]
    assert len(short) <= -(-len(LENGTHS) // RULE.window)


def test_epochs_and_seeds_differ_and_repeat():
    def samples(rule, epoch):
        return [p.samples.tolist() for p in BatchStream(LENGTHS, rule, start=Progress(epoch))]

    other = BatchRule(tokens_per_batch=1_000, max_length=128, window=64, seed=4)
    assert samples(RULE, 0) == samples(RULE, 0)
    assert samples(RULE, 0) != samples(RULE, 1)
    assert samples(RULE, 0) != samples(other, 0)


def test_batches_do_not_come_in_the_order_of_their_lengths():
    lengths = [p.length for p in BatchStream(LENGTHS, RULE)]
    steps = np.diff(lengths)
    assert (steps > 0).sum() > len(steps) / 5
    assert (steps < 0).sum() > len(steps) / 5


def test_batches_are_shuffled_anew_in_each_epoch():
    # One window, so that the batches of all epochs have the same lengths.
    rule = BatchRule(tokens_per_batch=1_000, max_length=128, window=1_000)
    one, other = (
        [p.length for p in BatchStream(LENGTHS, rule, start=Progress(epoch))] for epoch in (0, 1)
    )
    assert sorted(one) == sorted(other)
    assert one != other


@pytest.mark.parametrize("world_size", [1, 2, 4, 7])
def test_global_batches_are_the_same_for_any_number_of_ranks(world_size):
    whole = list(BatchStream(LENGTHS, RULE, num_batches=150))
    ranks = [
        list(BatchStream(LENGTHS, RULE, num_batches=150, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    for step, plan in enumerate(whole):
        shares = [rank[step] for rank in ranks]
        assert {(s.length, s.after, len(s.samples)) for s in shares} == {
            (plan.length, plan.after, -(-len(plan.samples) // world_size))
        }
        rows = np.stack([s.samples for s in shares], axis=1).reshape(-1)
        assert rows[: len(plan.samples)].tolist() == plan.samples.tolist()
        assert (rows[len(plan.samples) :] == FILLER).all()


def test_resuming_from_every_progress_gives_the_tail():
    total = 150
    plans = list(BatchStream(LENGTHS, RULE, num_batches=total))
    assert plans[-1].epoch >= 1
    for done, plan in enumerate(plans, start=1):
        stream = BatchStream(LENGTHS, RULE, start=plan.after, num_batches=total, done=done)
        assert len(stream) == total
        assert contents(stream) == contents(plans[done:])


def test_one_epoch_can_be_resumed_and_its_end_is_empty():
    plans = list(BatchStream(LENGTHS, RULE))
    half = BatchStream(LENGTHS, RULE, start=plans[10].after)
    assert contents(half) == contents(plans[11:])
    assert len(half) == len(plans)
    assert list(BatchStream(LENGTHS, RULE, start=Progress(0, len(LENGTHS)))) == []


def test_a_stream_can_be_iterated_again():
    stream = BatchStream(LENGTHS, RULE)
    assert contents(stream) == contents(stream)


def test_progress_inside_a_batch_is_our_own_mistake():
    first = next(iter(BatchStream(LENGTHS, RULE)))
    with pytest.raises(AssertionError):
        list(BatchStream(LENGTHS, RULE, start=Progress(0, first.after.samples - 1)))


def test_a_long_run_needs_no_list():
    stream = BatchStream(LENGTHS, RULE, num_batches=10**9, start=Progress(10**6))
    assert len(stream) == 10**9
    assert next(iter(stream)).epoch == 10**6
    assert len(list(islice(stream, 200))) == 200


@pytest.mark.parametrize("max_length", [3, 16, 63, 64, 65, 1_000, 8_192])
def test_edges_ascend_to_the_longest(max_length):
    edges = BatchRule(tokens_per_batch=1, max_length=max_length).edges
    assert edges[-1] == max_length
    assert (np.diff(edges) > 0).all()
    assert len(edges) <= 8 * 8 + 1


def test_edges_can_be_given():
    rule = BatchRule(tokens_per_batch=2_000, max_length=100, bucket_edges=(50, 100))
    assert {plan.length for plan in BatchStream(LENGTHS, rule)} == {50, 100}


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens_per_batch": 0},
        {"max_length": 2},
        {"window": 0},
        {"bucket_edges": ()},
        {"bucket_edges": (64, 64, 128)},
        {"bucket_edges": (64, 100)},
    ],
)
def test_impossible_rules_are_refused(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        BatchRule(**({"tokens_per_batch": 1_000, "max_length": 128} | wrong))


def test_at_least_95_percent_of_the_tokens_of_the_sample_are_no_padding():
    path = sample_dir() / "uniprot_sample.fasta.gz"
    lengths = np.array([len(record.sequence) for record in read_fasta(path, Tally())])
    rule = BatchRule(tokens_per_batch=16_384, max_length=1_024)
    assert 0.95 <= useful_share(lengths, rule) <= 1
    # Eight edges to a doubling: few shapes to compile.
    assert len(rule.edges) == 33
