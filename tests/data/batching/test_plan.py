"""Batches: complete, in buckets or packed, the same for any ranks, resumable; and forecasts."""

import re
from dataclasses import replace
from itertools import chain, islice

import numpy as np
import pytest

from protlm.data.batching.mixture import Mixture, SampleOrder
from protlm.data.batching.plan import BatchStream, Progress, RankBatches, forecast
from protlm.data.batching.strategies import Concatenation, LengthBuckets, WholeProteins
from protlm.data.records import Tally, read_records
from protlm.data.shards.data_set import open_split
from protlm.data.vocabulary import VOCABULARY
from protlm.system.errors import UserError
from protlm.system.paths import sample_dir

NUM_SAMPLES = 150
# Clusters have twice as many sequences, and an epoch as many samples.
LENGTHS = np.random.default_rng(0).integers(1, 300, 2 * NUM_SAMPLES)
RULES = {
    "sequences": LengthBuckets(1_000, 128, block=32),
    "concatenated": Concatenation(300, 128, block=32),
    "packed": WholeProteins(600, 128, block=32, row=300),
    "one row to a batch": Concatenation(50, 128, block=10),
}

MANY = np.random.default_rng(0).integers(1, 300, 5_000)
MANY_ORDER = SampleOrder([len(MANY)], seed=1)
BUCKETS = LengthBuckets(4_000, 128, block=1_000)


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
        list(stream(order, rule, num_batches=40, share=RankBatches(rank, world_size)))
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


@pytest.mark.slow
def test_resuming_from_every_progress_gives_the_tail(order, rule):
    total = len(stream(order, rule)) + 10
    plans = list(stream(order, rule, num_batches=total))
    assert plans[-1].after.epoch >= 1
    for done, plan in enumerate(plans, start=1):
        rest = stream(order, rule, start=plan.after, num_batches=total, done=done)
        assert len(rest) == total
        assert list(islice(rest, 3)) == plans[done : done + 3]


@pytest.mark.parametrize(
    "share", [RankBatches(), RankBatches(1, 3), RankBatches(0, 2, micro_batches=3)], ids=str
)
@pytest.mark.parametrize("batches_per_step", [1, 3])
def test_batches_have_the_number_of_their_step(order, rule, share, batches_per_step):
    """The same on all ranks and for all parts of a batch, wherever the run was resumed."""
    share = replace(share, batches_per_step=batches_per_step)
    plans = list(stream(order, rule, num_batches=12, share=share))
    expected = [
        batch // batches_per_step for batch in range(12) for _ in range(share.micro_batches)
    ]
    assert [plan.step for plan in plans] == expected
    for done in range(0, 12, batches_per_step):
        start = plans[done * share.micro_batches - 1].after if done else Progress()
        rest = stream(order, rule, start=start, num_batches=12, done=done, share=share)
        assert list(rest) == plans[done * share.micro_batches :]


def test_progress_grows_and_ends_with_the_epoch(order, rule):
    batches = stream(order, rule)
    plans = list(batches)
    places = [plan.after for plan in plans]
    assert places == sorted(set(places))
    assert places[-1] == Progress(1, 0)
    assert all(place < Progress(1, 0) for place in places[:-1])
    # A stream can be iterated again; one epoch can be resumed, and its end is empty.
    assert list(batches) == plans
    half = stream(order, rule, start=plans[7].after)
    assert list(half) == plans[8:] != []
    assert len(batches) == len(half) == len(plans)
    assert list(stream(order, rule, start=Progress(0, len(order)))) == []


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
        with pytest.raises(UserError, match=r"another version of protlm.*begin another"):
            list(stream(order, RULES[rule], start=inside))


def test_only_the_current_block_is_read(order, rule):
    asked = []

    def lengths_of(samples):
        asked.append(len(samples))
        return LENGTHS.take(samples)

    place = Progress(10**6, 3 * rule.block)
    batches = BatchStream(lengths_of, order, rule, num_batches=10**9, start=place)
    assert len(batches) == 10**9
    assert asked == []
    assert next(iter(batches)).after.epoch >= 10**6
    assert asked == [rule.block]


@pytest.mark.parametrize("rule_of", [LengthBuckets, Concatenation])
def test_a_block_has_as_many_batches_whatever_their_size(rule_of):
    sizes = [rule_of(tokens, 1_024).block_size for tokens in (1, 131_072, 131_073, 2**21)]
    assert sizes == [16_384, 16_384, 32_768, 2**18]
    assert rule_of(2**21, 1_024, block=7).block_size == 7


@pytest.mark.parametrize("rule_of", [Concatenation, LengthBuckets])
@pytest.mark.parametrize(
    ("name", "value"), [("tokens_per_batch", 0), ("max_length", 2), ("block", 0)]
)
def test_invalid_rules_are_rejected(rule_of, name, value):
    with pytest.raises(UserError, match=name):
        rule_of(**({"tokens_per_batch": 1_000, "max_length": 128} | {name: value}))


def test_cropping_is_counted_in_the_first_block():
    asked = []

    def lengths_of(samples):
        asked.extend(samples.tolist())
        return MANY.take(samples)

    found = forecast(lengths_of, MANY_ORDER, BUCKETS)
    drawn = MANY_ORDER.draw(0, np.arange(BUCKETS.block)).samples
    assert set(asked) == set(drawn.tolist())
    left_out = np.maximum(MANY[drawn] + 2 - 128, 0)
    cropped = np.count_nonzero(left_out)
    said = f"{cropped} of the first 1,000 sequences are cropped, by {left_out.sum():,} "
    assert found.startswith(said)
    # What fits is not mentioned.
    text = forecast(MANY.take, MANY_ORDER, LengthBuckets(4_000, 302))
    assert "cropped" not in text
    assert text.endswith("of the positions of a batch are padding")
    # Joined sequences have hardly any padding: of a block's 1,000 rows and more, one is short.
    joined = forecast(MANY.take, MANY_ORDER, Concatenation(4_096, 128, block=1_000))
    assert re.fullmatch(r"0\.[01]% of the positions of a batch are padding", joined)


SOME = np.random.default_rng(0).integers(1, 300, 500)
ROWS = LengthBuckets(1_000, 128, block=64)


def plans_of(rule=ROWS, *, epoch=0, shuffle=True):
    order = SampleOrder([len(SOME)], seed=3, shuffle=shuffle)
    return list(BatchStream(SOME.take, order, rule, start=Progress(epoch)))


def samples(plan):
    return [row.sample for row in plan.rows]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("block", [1, 64, 499, 500, 10_000])
def test_an_epoch_has_every_sample_once_in_other_batches_than_the_next(shuffle, block):
    rule = LengthBuckets(1_000, 128, block=block, crop="random")
    plans, others = (plans_of(rule, shuffle=shuffle, epoch=epoch) for epoch in (0, 1))
    assert sorted(chain.from_iterable(map(samples, plans))) == list(range(len(SOME)))
    assert {(row.max_length, row.crop) for plan in plans for row in plan.rows} == {(128, "random")}
    lengths, next_lengths = ([plan.length for plan in some] for some in (plans, others))
    if block >= len(SOME):
        # One block, so that the batches of all epochs have the same lengths.
        assert sorted(lengths) == sorted(next_lengths)
        assert lengths != next_lengths


def test_batches_keep_to_the_budget_and_fit_their_samples():
    plans = plans_of()
    for plan in plans:
        longest = min(SOME[samples(plan)].max() + 2, ROWS.max_length)
        # No smaller edge would do.
        assert plan.length == ROWS.edges[np.searchsorted(ROWS.edges, longest)]
        assert len(plan.rows) * plan.length <= ROWS.tokens_per_batch
    # Only the last batch of a block is far below the budget.
    short = [p for p in plans if (len(p.rows) + 1) * p.length <= ROWS.tokens_per_batch]
    assert len(short) <= -(-len(SOME) // ROWS.block)
    # They do not come in the order of their lengths.
    steps = np.diff([plan.length for plan in plans])
    assert min((steps > 0).sum(), (steps < 0).sum()) > len(steps) / 5
    # A row over the budget is a separate batch.
    assert {len(plan.rows) for plan in plans_of(LengthBuckets(50, 400))} == {1}


@pytest.mark.parametrize("max_length", [3, 16, 63, 64, 65, 1_000, 8_192])
def test_edges_are_ascending_up_to_the_maximum(max_length):
    edges = LengthBuckets(1, max_length).edges
    assert edges[-1] == max_length
    assert (np.diff(edges) > 0).all()
    # Few shapes to compile: sixteen to a doubling.
    assert len(edges) <= 16 * 8 + 1


@pytest.mark.parametrize("tokens_per_batch", [8_192, 16_384, 65_536, 131_072])
def test_at_most_5_percent_of_the_sample_s_batches_is_padding(tokens_per_batch):
    lengths = sample_lengths()
    rule = LengthBuckets(tokens_per_batch, 1_024)
    order = SampleOrder([len(lengths)])
    padded = sum(len(plan.rows) * plan.length for plan in BatchStream(lengths.take, order, rule))
    share = np.minimum(lengths + 2, 1_024).sum() / padded
    assert 0.95 <= share <= 1
    # What is said at the start of training is this: the sample is one block.
    said = f"{1 - share:.1%} of the positions of a batch are padding"
    assert forecast(lengths.take, order, rule).endswith(said)


# Sequences of a block of packed rows.
BLOCK = 15


@pytest.fixture
def mixture(data_set):
    return Mixture([open_split(data_set, "train")])


def packed_plans(mixture, rule):
    return list(BatchStream(mixture.lengths_of, mixture.order(seed=2), rule))


def stream_of(mixture, first):
    """The tokens of a block, sequence after sequence."""
    last = min(first + BLOCK, len(mixture))
    samples = mixture.order(seed=2).draw(0, np.arange(first, last)).samples
    return [token for s in samples for token in [*mixture[s].tolist(), VOCABULARY.eos]]


@pytest.mark.parametrize("max_length", [3, 64, 100, 5_000])
@pytest.mark.parametrize("tokens_per_batch", [1, 400])
def test_rows_are_the_stream_of_each_block_cut_in_pieces(mixture, max_length, tokens_per_batch):
    found, blocks = [], []
    for plan in packed_plans(mixture, Concatenation(tokens_per_batch, max_length, block=BLOCK)):
        assert plan.length == max_length
        assert len(plan.rows) <= max(tokens_per_batch // max_length, 1)
        found += [row.read(mixture, seed=0)[0][0].tolist() for row in plan.rows]
        if plan.after.tokens == 0 and plan.after.samples % BLOCK == 0:
            blocks.append(found)
            found = []
    assert len(blocks) == 3
    for number, rows in enumerate(blocks):
        assert [len(row) for row in rows[:-1]] == [max_length] * (len(rows) - 1)
        assert all(row[0] == VOCABULARY.cls for row in rows)
        assert [token for row in rows for token in row[1:]] == stream_of(mixture, number * BLOCK)


def test_places_are_those_of_the_tokens(mixture):
    lengths = mixture.lengths_of(mixture.order(seed=2).draw(0, np.arange(40)).samples)
    ends = np.concatenate(([0], np.cumsum(lengths + 1)))
    done = 0
    rule = Concatenation(60, 30, block=40)
    for plan in packed_plans(mixture, rule)[:-1]:
        done += 2 * 29
        assert ends[plan.after.samples] + plan.after.tokens == done
        assert plan.after.tokens <= lengths[plan.after.samples]
    assert rule.left_out(np.array([10, 10**6])).tolist() == [0, 0]


def test_rows_have_independent_random_numbers(mixture):
    plans = packed_plans(mixture, Concatenation(60, 30, block=BLOCK))
    rows = [row for plan in plans for row in plan.rows]
    draws = {tuple(row.read(mixture, seed=0)[0][1].random(3)) for row in rows}
    assert len(draws) == len(rows)
    assert tuple(rows[5].read(mixture, seed=0)[0][1].random(3)) in draws
    for row, seed in ((rows[5], 1), (replace(rows[5], epoch=1), 0)):
        assert tuple(row.read(mixture, seed=seed)[0][1].random(3)) not in draws


def packed_rows(rule, lengths, seed=1):
    order = SampleOrder([len(lengths)], seed=seed)
    return [row for plan in BatchStream(lengths.take, order, rule) for row in plan.rows]


def sample_lengths():
    path = sample_dir() / "uniprot_sample.fasta.gz"
    return np.array([len(record.sequence) for record in read_records(path, Tally())])


def test_packed_rows_have_every_protein_once_and_are_full():
    lengths = sample_lengths()
    rows = packed_rows(WholeProteins(65_536, 1_024), lengths)
    assert sorted(chain.from_iterable(row.samples for row in rows)) == list(range(len(lengths)))
    sizes = [np.minimum(lengths[[*row.samples]] + 2, 1_024).sum() for row in rows]
    assert max(sizes) <= 16_384
    # All but one, the last of the epoch's block, which is shuffled.
    assert sum(sorted(sizes)[1:]) >= 0.995 * 16_384 * (len(rows) - 1)
    # A row has a mixture of lengths, not the longest ones.
    means = [lengths[[*row.samples]].mean() for row in rows]
    assert np.std(means) < 2 * lengths.std() / np.sqrt(36)


def test_packed_rows_of_short_proteins_have_a_limited_number():
    rows = packed_rows(WholeProteins(160, 100, row=160), np.full(95, 1))
    assert sorted(len(row.samples) for row in rows) == [5] + [10] * 9
    # A row has room for the longest protein, and no more than a batch otherwise.
    assert WholeProteins(160, 100).longest_row == 160
    assert WholeProteins(160, 1_000).longest_row == 1_000
