"""The order of samples: permutations, mixtures in proportion, and clusters with turns."""

from collections import Counter
from itertools import pairwise
from math import lcm

import numpy as np
import pytest

from protlm.data.batching.mixture import Mixture, SampleOrder, integer_weights, round_robin
from protlm.data.batching.order import EpochOrder, hashed
from protlm.data.batching.plan import forecast
from protlm.data.batching.strategies import LengthBuckets
from protlm.data.shards.data_set import open_clusters, open_split
from protlm.data.vocabulary import VOCABULARY
from protlm.system.errors import UserError


@pytest.mark.parametrize("num_samples", [*range(1, 201), 10_007])
def test_an_epoch_is_a_permutation(num_samples):
    for epoch in range(3):
        order = EpochOrder(num_samples, seed=1, epoch=epoch)[np.arange(num_samples)]
        assert sorted(order.tolist()) == list(range(num_samples))


def test_any_positions_can_be_looked_up():
    order = EpochOrder(1_000, seed=1, epoch=2)
    everything, some = order[np.arange(1_000)], np.array([999, 3, 3, 512])
    assert order[some].tolist() == everything[some].tolist()
    assert order[np.zeros(0, int)].shape == (0,)
    # Without a list of 250 million.
    many = EpochOrder(250_000_000, seed=0, epoch=0)[np.array([0, 249_999_999])]
    assert 0 <= many.min() <= many.max() < 250_000_000


def test_orders_differ_between_seeds_and_epochs():
    keys = [(seed, epoch) for seed in (-1, 0, 1, 2**40) for epoch in range(5)]
    orders = {tuple(EpochOrder(100, seed=s, epoch=e)[np.arange(100)]) for s, e in keys}
    assert len(orders) == len(keys)


@pytest.mark.parametrize(
    "shares", [[1], [1, 1], [3, 1], [1, 2, 3], [97, 2, 1], [5, 5, 5, 1], [1000, 999, 1]]
)
def test_after_any_number_of_turns_every_proportion_holds_within_one(shares):
    turns = round_robin(shares)
    counts = np.cumsum(turns[:, None] == np.arange(len(shares)), axis=0)
    assert counts[-1].tolist() == shares
    parts = np.arange(1, len(turns) + 1)[:, None] * np.array(shares) / len(turns)
    assert np.abs(counts - parts).max() < 1


def test_any_position_is_computed_directly():
    order = SampleOrder([250_000_000, 500_000, 7], shares=[90, 9, 1], seed=1)
    near, far = order.draw(0, np.array([3])), order.draw(10**6, np.array([3, 10**8]))
    assert near.passes.tolist() == [0]
    assert far.passes.max() > 9 * 10**5
    assert (far.samples < len(order)).all()


def test_weights_are_exact_decimals():
    turns = {(1.0,): [1], (0.7, 0.3): [7, 3], (2, 4): [1, 2], (1, 2.5): [2, 5], (0.1, 0.1): [1, 1]}
    assert {weights: integer_weights(weights) for weights in turns} == turns


@pytest.mark.parametrize("wrong", [[0], [-1, 2], [float("nan")], [float("inf")], [1, 0.123457]])
def test_invalid_weights_are_rejected(wrong):
    with pytest.raises(UserError, match=str(wrong[-1] if len(wrong) == 1 else wrong[0])):
        integer_weights(wrong)


@pytest.fixture
def splits(make_data_set, proteins):
    names = {"one": proteins[:17], "other": proteins[17:]}
    return [open_split(make_data_set(some, name), "train") for name, some in names.items()]


def test_sequences_are_numbered_consecutively(splits, proteins):
    mixture = Mixture(splits, [3, 1])
    found = [VOCABULARY.decode(mixture[sample]) for sample in range(len(mixture))]
    assert found == [sequence for _, sequence in proteins]
    some = np.array([39, 0, 17, 16, 16])
    assert mixture.lengths_of(some).tolist() == [len(proteins[i][1]) for i in some]
    assert len(mixture.order(seed=0)) == len(proteins)


def test_the_fingerprint_is_that_of_the_data_their_weights_and_clusters(
    splits, make_data_set, proteins
):
    one, other = splits
    # Sequences of the same lengths, with which a run must not resume.
    reversed_ = [(name, sequence[::-1]) for name, sequence in proteins[:17]]
    same_lengths = open_split(make_data_set(reversed_, "reversed"), "train")
    # The same shards with other indexes.
    some = [(f"p{i}", "M" * 5) for i in range(17)]
    folders = [make_data_set(some, "x", [0] * 17), make_data_set(some, "y", [0, 1] * 8 + [0])]
    first, second = (open_clusters(folder, "train") for folder in folders)
    mixtures = [
        ([one], [1], None), ([other], [1], None), ([one, other], [1, 1], None),
        ([other, one], [1, 1], None), ([one, other], [1, 2], None), ([one, one], [1, 1], None),
        ([same_lengths], [1], None), ([one], [1], [first]), ([one], [1], [second]),
        ([one, one], [1, 1], [first, second]), ([one, one], [2, 1], [first, second]),
    ]  # fmt: skip
    assert len({Mixture(*mixture).fingerprint for mixture in mixtures}) == len(mixtures)
    assert Mixture([one]).fingerprint == one.fingerprint


MEMBERS = [1, 1, 2, 3, 4, 6, 1, 12]


def clusters_of(sizes):
    """A cluster for each sequence, as far apart in the split as they go."""
    numbers = np.repeat(np.arange(len(sizes)), sizes)
    return np.random.default_rng(0).permutation(numbers).tolist()


@pytest.fixture
def opened(make_data_set):
    """Opens a data set of clusters of some sizes: the split, its index, and the truth."""

    def make(sizes, name="data"):
        clusters = clusters_of(sizes)
        proteins = [(f"{name}{i}", "M" * (i % 50 + 1)) for i in range(len(clusters))]
        directory = make_data_set(proteins, name, clusters)
        return open_split(directory, "train"), open_clusters(directory, "train"), clusters

    return make


def test_an_epoch_draws_every_cluster_once_and_its_members_in_turn(opened):
    split, index, clusters = opened(MEMBERS)
    order = SampleOrder([len(split)], seed=1, clusters=[index])
    assert len(order) == len(MEMBERS)
    everywhere = np.arange(len(order))
    draws = [order.draw(number, everywhere) for number in range(2 * lcm(*MEMBERS))]
    for number, draw in enumerate(draws):
        assert sorted(clusters[sample] for sample in draw.samples) == list(range(len(MEMBERS)))
        assert set(draw.passes.tolist()) == {number}
        # Clusters come in the order of the epoch.
        epoch = EpochOrder(len(MEMBERS), seed=1, epoch=number)[everywhere]
        expected = index.members(epoch, hashed(epoch, seed=1), number)
        assert draw.samples.tolist() == expected.tolist()
    # Members come equally often.
    counts = Counter(sample for draw in draws for sample in draw.samples.tolist())
    assert len(counts) == sum(MEMBERS)
    for sample, count in counts.items():
        assert count == len(draws) // MEMBERS[clusters[sample]]
    # None repeats before all others were drawn, from any pass on, not only from the first.
    drawn = [{clusters[s]: s for s in draw.samples.tolist()} for draw in draws]
    for cluster, size in enumerate(MEMBERS):
        members = [one[cluster] for one in drawn]
        for start in range(len(members) - size):
            assert len(set(members[start : start + size])) == size


@pytest.mark.parametrize("size", [2, 3, 7])
def test_the_first_members_are_spread_evenly(size):
    """Each start is as likely as any other, whatever the seed and the data set."""
    items = np.arange(60_000)
    draws = {}
    for seed, stream in [(0, 0), (1, 0), (0, 1), (2**63, 0)]:
        starts = hashed(items, seed=seed, stream=stream) % np.uint64(size)
        draws[seed, stream] = starts
        counts = np.bincount(starts.astype(np.int64), minlength=size)
        expected = len(items) / size
        chi_square = ((counts - expected) ** 2 / expected).sum()
        # Its mean is size - 1, and its variance twice that.
        assert abs(chi_square - (size - 1)) < 5 * (2 * (size - 1)) ** 0.5
        # Neighbors do not go together.
        pairs = np.count_nonzero(starts[1:] == starts[:-1])
        assert abs(pairs - expected) < 5 * (expected * (1 - 1 / size)) ** 0.5
    for one, other in pairwise(draws.values()):
        same = np.count_nonzero(one == other)
        assert abs(same - len(items) / size) < 5 * (len(items) / size * (1 - 1 / size)) ** 0.5


@pytest.mark.parametrize("has_clusters", [False, True])
def test_a_mixture_draws_by_its_shares_and_each_pass_takes_everything_once(opened, has_clusters):
    """Sequences, or clusters by one of their sequences."""
    sizes, shares = [MEMBERS, [5, 1, 2], [4] * 5], [5, 4, 2]
    splits, indexes, clusters = zip(
        *(opened(some, f"{number}") for number, some in enumerate(sizes)), strict=True
    )
    mixture = Mixture(splits, shares, indexes if has_clusters else None)
    order, counts = mixture.order(seed=2), [sum(some) for some in sizes]
    ends = np.cumsum(counts)
    # What a sample stands for: itself, or its cluster.
    items = np.concatenate(clusters) if has_clusters else np.arange(ends[-1])
    if has_clusters:
        counts = [len(some) for some in sizes]
    assert len(mixture) == ends[-1]
    assert mixture.num_clusters == (sum(counts) if has_clusters else None)
    assert len(order) == sum(counts)
    draws = [order.draw(epoch, np.arange(len(order))) for epoch in range(40)]
    # Positions can be looked up in any order.
    some = np.random.default_rng(0).integers(0, len(order), 25)
    for one, other in zip(mixture.order(seed=2).draw(3, some)[:2], draws[3][:2], strict=True):
        assert one.tolist() == other[some].tolist()
    samples = np.concatenate([draw.samples for draw in draws])
    passes = np.concatenate([draw.passes for draw in draws])
    turns = np.arange(1, len(samples) + 1)
    for number, (share, count) in enumerate(zip(shares, counts, strict=True)):
        is_here = np.searchsorted(ends, samples, side="right") == number
        # The shares hold at every moment.
        assert np.abs(np.cumsum(is_here) - turns * share / sum(shares)).max() < 1
        last = passes[is_here].max()
        rounds = [items[samples[is_here & (passes == n)]].tolist() for n in range(last)]
        assert len(rounds) > 2
        assert all(len(some) == len(set(some)) == count for some in rounds)
        # In different orders.
        assert len(set(map(tuple, rounds))) > 1


def test_a_forecast_counts_what_an_epoch_draws(opened):
    one, other = opened(MEMBERS), opened([5, 1, 2], "other")
    mixture = Mixture([one[0], other[0]], clusters=[one[1], other[1]])
    order = mixture.order(seed=0)
    rule = LengthBuckets(100, 22)
    over = mixture.lengths_of(order.draw(0, np.arange(len(order))).samples) - 20
    cropped = over[over > 0]
    said = f"{len(cropped)} of the first {len(order)} sequences are cropped, by {cropped.sum()} "
    assert forecast(mixture.lengths_of, order, rule).startswith(said)
    assert 0 < len(cropped) < len(order)
