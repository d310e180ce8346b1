"""Sampling by cluster: an epoch draws each cluster once, and its members take turns."""

from collections import Counter
from itertools import pairwise
from math import lcm

import numpy as np
import pytest

from protlm.data.batching.mixture import Mixture, SampleOrder
from protlm.data.batching.order import EpochOrder, hashed
from protlm.data.batching.plan import forecast
from protlm.data.batching.strategies import LengthBuckets
from protlm.data.shards.data_set import open_clusters, open_split

SIZES = [1, 1, 2, 3, 4, 6, 1, 12]


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


def passes_of(order, num_passes):
    everywhere = np.arange(len(order))
    return [order.draw(number, everywhere) for number in range(num_passes)]


def test_an_epoch_draws_every_cluster_once(opened):
    split, index, clusters = opened(SIZES)
    order = SampleOrder([len(split)], seed=1, clusters=[index])
    assert len(order) == len(SIZES)
    for number, draw in enumerate(passes_of(order, 20)):
        assert sorted(clusters[sample] for sample in draw.samples) == list(range(len(SIZES)))
        assert set(draw.passes.tolist()) == {number}


def test_members_come_equally_often(opened):
    split, index, _ = opened(SIZES)
    order = SampleOrder([len(split)], seed=1, clusters=[index])
    draws = passes_of(order, 2 * lcm(*SIZES))
    counts = Counter(sample for draw in draws for sample in draw.samples.tolist())
    clusters = clusters_of(SIZES)
    assert len(counts) == sum(SIZES)
    for sample, count in counts.items():
        assert count == len(draws) // SIZES[clusters[sample]]


def test_no_member_repeats_before_all_others_were_drawn(opened):
    """This holds from any pass on, not only from the first."""
    split, index, clusters = opened(SIZES)
    order = SampleOrder([len(split)], seed=1, clusters=[index])
    drawn = [{clusters[s]: s for s in draw.samples.tolist()} for draw in passes_of(order, 30)]
    for cluster, size in enumerate(SIZES):
        members = [one[cluster] for one in drawn]
        for start in range(len(members) - size):
            assert len(set(members[start : start + size])) == size


def test_clusters_come_in_the_order_of_the_epoch(opened):
    split, index, _ = opened(SIZES)
    order = SampleOrder([len(split)], seed=3, clusters=[index])
    everywhere = np.arange(len(SIZES))
    for epoch in range(3):
        clusters = EpochOrder(len(SIZES), seed=3, epoch=epoch)[everywhere]
        starts = hashed(clusters, seed=3)
        expected = index.members(clusters, starts, epoch)
        assert order.draw(epoch, everywhere).samples.tolist() == expected.tolist()


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


def test_seeds_and_data_sets_draw_differently(opened):
    split, index, _ = opened([3] * 40)

    def samples(seed, number=0):
        sizes, indexes = [len(split)] * 2, [index] * 2
        order = SampleOrder(sizes, seed=seed, clusters=indexes)
        drawn = order.draw(0, np.arange(len(order))).samples
        mine = drawn[(drawn >= len(split)) == bool(number)]
        return set((mine % len(split)).tolist())

    assert samples(0) == samples(0)
    assert samples(0) != samples(1)
    assert samples(0) != samples(0, number=1)


def test_positions_can_be_looked_up_in_any_order(opened):
    split, index, _ = opened(SIZES)
    other, other_index, _ = opened([2, 5], "other")
    sizes, indexes = [len(split), len(other)], [index, other_index]
    order = SampleOrder(sizes, shares=[5, 2], seed=1, clusters=indexes)
    again = SampleOrder(sizes, shares=[5, 2], seed=1, clusters=indexes)
    for epoch in (0, 3, 10**6):
        whole = order.draw(epoch, np.arange(len(order)))
        some = np.random.default_rng(epoch).integers(0, len(order), 25)
        assert again.draw(epoch, some).samples.tolist() == whole.samples[some].tolist()
        assert again.draw(epoch, some).passes.tolist() == whole.passes[some].tolist()


@pytest.fixture
def two(opened):
    one, index, clusters = opened(SIZES)
    other, other_index, other_clusters = opened([5, 1, 2], "other")
    splits, indexes = [one, other], [index, other_index]
    # The clusters of the second are numbered after those of the first.
    return splits, indexes, [*clusters, *(c + len(SIZES) for c in other_clusters)]


def test_data_sets_of_a_mixture_are_each_drawn_by_their_clusters(two):
    splits, indexes, clusters = two
    mixture = Mixture(splits, [3, 1], indexes)
    order = mixture.order(seed=2)
    assert len(order) == mixture.num_clusters == len(SIZES) + 3
    assert len(mixture) == sum(SIZES) + 8
    positions = np.arange(len(order))
    draws = [order.draw(epoch, positions) for epoch in range(40)]
    samples = np.concatenate([draw.samples for draw in draws])
    passes = np.concatenate([draw.passes for draw in draws])
    is_first = samples < sum(SIZES)
    # The shares hold at every moment, as they do without clusters.
    turns = np.arange(1, len(samples) + 1)
    assert np.abs(np.cumsum(is_first) - turns * 3 / 4).max() < 1
    seen = Counter(zip(np.array(clusters)[samples].tolist(), passes.tolist(), strict=True))
    assert set(seen.values()) == {1}
    for here, count in ((is_first, len(SIZES)), (~is_first, 3)):
        per_pass = np.bincount(passes[here])
        assert set(per_pass[:-1].tolist()) == {count}


def test_the_fingerprint_depends_on_the_clusters(opened, make_data_set, two):
    splits, indexes, _ = two
    assert Mixture(splits[:1]).num_clusters is None
    proteins = [(f"p{i}", "M" * 5) for i in range(20)]
    prints = [
        Mixture(splits[:1]).fingerprint,
        Mixture(splits[:1], clusters=indexes[:1]).fingerprint,
        Mixture(splits).fingerprint,
        Mixture(splits, clusters=indexes).fingerprint,
        Mixture(splits, [2, 1], indexes).fingerprint,
    ]
    for name, clusters in (("x", [0] * 20), ("y", [0, 1] * 10)):
        directory = make_data_set(proteins, name, clusters)
        index = open_clusters(directory, "train")
        # The same shards with another index.
        prints.append(Mixture(splits[:1], clusters=[index]).fingerprint)
    assert len(set(prints)) == len(prints)


def test_a_forecast_counts_what_an_epoch_draws(two):
    splits, indexes, _ = two
    mixture = Mixture(splits, clusters=indexes)
    order = mixture.order(seed=0)
    rule = LengthBuckets(100, 22)
    drawn = order.draw(0, np.arange(len(order))).samples
    over = mixture.lengths_of(drawn) - 20
    found = forecast(mixture.lengths_of, order, rule)
    assert (found.cropped, found.left_out) == ((over > 0).sum(), over[over > 0].sum())
    assert 0 < found.cropped < len(order)
    assert found.is_exact
