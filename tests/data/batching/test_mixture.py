"""Mixtures: proportions hold at every moment, and every pass is complete."""

from collections import Counter

import numpy as np
import pytest

from protlm.data.batching.mixture import Mixture, SampleOrder, integer_weights, round_robin
from protlm.data.batching.order import EpochOrder
from protlm.data.shards.data_set import open_split
from protlm.data.vocabulary import VOCABULARY
from protlm.system.errors import UserError

SIZES, SHARES = [100, 45, 5], [5, 4, 2]
ENDS = np.cumsum(SIZES)


def drawn(order, num_positions):
    """The draws of a run, epoch after epoch, as pairs of sample and pass."""
    positions = np.arange(len(order))
    epochs = range(-(-num_positions // len(order)))
    draws = [order.draw(epoch, positions) for epoch in epochs]
    pairs = [pair for draw in draws for pair in zip(*(part.tolist() for part in draw), strict=True)]
    return pairs[:num_positions]


@pytest.mark.parametrize(
    "shares", [[1], [1, 1], [3, 1], [1, 2, 3], [97, 2, 1], [5, 5, 5, 1], [1000, 999, 1]]
)
def test_after_any_number_of_turns_every_proportion_holds_within_one(shares):
    turns = round_robin(shares)
    counts = np.cumsum(turns[:, None] == np.arange(len(shares)), axis=0)
    assert counts[-1].tolist() == shares
    parts = np.arange(1, len(turns) + 1)[:, None] * np.array(shares) / len(turns)
    assert np.abs(counts - parts).max() < 1


def test_proportions_hold_over_the_whole_run():
    pairs = drawn(SampleOrder(SIZES, shares=SHARES, seed=1), 1_000)
    numbers = np.searchsorted(ENDS, [sample for sample, _ in pairs], side="right")
    for number, share in enumerate(SHARES):
        counts = np.cumsum(numbers == number)
        assert np.abs(counts - np.arange(1, 1_001) * share / sum(SHARES)).max() < 1


def test_every_pass_takes_every_sample_once():
    pairs = drawn(SampleOrder(SIZES, shares=SHARES, seed=1), 10 * sum(SIZES))
    assert len(set(pairs)) == len(pairs)
    passes = Counter(
        (int(np.searchsorted(ENDS, sample, side="right")), repeat) for sample, repeat in pairs
    )
    for number, size in enumerate(SIZES):
        counts = [count for (of, _), count in sorted(passes.items()) if of == number]
        assert counts[:-1] == [size] * (len(counts) - 1)
        assert len(counts) > 2


def test_passes_have_different_orders():
    pairs = drawn(SampleOrder(SIZES, shares=SHARES, seed=1), 10 * sum(SIZES))
    orders = [tuple(s for s, p in pairs if s < 100 and p == repeat) for repeat in range(4)]
    assert len(set(orders)) == 4


def test_data_sets_of_the_same_size_have_different_orders():
    pairs = drawn(SampleOrder([50, 50], seed=1), 100)
    assert [s for s, _ in pairs if s < 50] != [s - 50 for s, _ in pairs if s >= 50]


def test_for_a_single_data_set_a_pass_is_an_epoch():
    order = SampleOrder([100], seed=1)
    for epoch in range(3):
        draw = order.draw(epoch, np.arange(100))
        assert (
            draw.samples.tolist() == EpochOrder(100, seed=1, epoch=epoch)[np.arange(100)].tolist()
        )
        assert set(draw.passes) == {epoch}


def test_any_position_is_computed_directly():
    order = SampleOrder([250_000_000, 500_000, 7], shares=[90, 9, 1], seed=1)
    near, far = order.draw(0, np.array([3])), order.draw(10**6, np.array([3, 10**8]))
    assert near.passes.tolist() == [0]
    assert far.passes.max() > 9 * 10**5
    assert (far.samples < len(order)).all()


@pytest.mark.parametrize(
    "weights, turns",
    [
        ([1.0], [1]),
        ([0.7, 0.3], [7, 3]),
        ([2, 4], [1, 2]),
        ([1, 2.5], [2, 5]),
        ([0.1] * 3, [1] * 3),
    ],
)
def test_weights_are_exact_decimals(weights, turns):
    assert integer_weights(weights) == turns


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
    assert len(mixture) == len(proteins)
    for sample, (_, sequence) in enumerate(proteins):
        assert VOCABULARY.decode(mixture[sample]) == sequence
    some = np.array([39, 0, 17, 16, 16])
    assert mixture.lengths_of(some).tolist() == [len(proteins[i][1]) for i in some]
    assert len(mixture.order(seed=0)) == len(proteins)


def test_the_fingerprint_is_that_of_the_data_and_their_weights(splits):
    one, other = splits
    prints = {
        Mixture(parts, shares).fingerprint
        for parts, shares in [
            ([one], [1]), ([other], [1]), ([one, other], [1, 1]), ([other, one], [1, 1]),
            ([one, other], [1, 2]), ([one, one], [1, 1]),
        ]
    }  # fmt: skip
    assert len(prints) == 6
    assert Mixture([one]).fingerprint == one.fingerprint


def test_the_fingerprint_distinguishes_sequences_of_the_same_lengths(make_data_set, proteins):
    """Otherwise, a run could resume with them."""
    others = [(name, sequence[::-1]) for name, sequence in proteins]
    one, other = (
        open_split(make_data_set(some, name), "train")
        for some, name in ((proteins, "one"), (others, "other"))
    )
    assert one.fingerprint != other.fingerprint
