"""The order of an epoch is a permutation and looks random."""

import numpy as np
import pytest

from protlm.data.batching.order import EpochOrder


@pytest.mark.parametrize("num_samples", [*range(1, 201), 10_007])
def test_an_epoch_is_a_permutation(num_samples):
    for epoch in range(3):
        order = EpochOrder(num_samples, seed=1, epoch=epoch)[np.arange(num_samples)]
        assert sorted(order.tolist()) == list(range(num_samples))


def test_without_shuffling_the_order_is_that_of_the_samples():
    order = EpochOrder(5, seed=1, epoch=3, shuffle=False)
    assert order[np.array([3, 0])].tolist() == [3, 0]


def test_any_positions_can_be_looked_up():
    order = EpochOrder(1_000, seed=1, epoch=2)
    everything, some = order[np.arange(1_000)], np.array([999, 3, 3, 512])
    assert order[some].tolist() == everything[some].tolist()
    assert order[np.zeros(0, int)].shape == (0,)


def test_orders_differ_between_seeds_and_epochs():
    keys = [(seed, epoch) for seed in (-1, 0, 1, 2**40) for epoch in range(5)]
    orders = {tuple(EpochOrder(100, seed=s, epoch=e)[np.arange(100)]) for s, e in keys}
    assert len(orders) == len(keys)


@pytest.mark.parametrize("num_samples", [3, 10, 100])
def test_each_sample_is_equally_often_in_each_place(num_samples):
    draws = 500
    counts = np.zeros((num_samples, num_samples))
    for epoch in range(draws):
        order = EpochOrder(num_samples, seed=0, epoch=epoch)[np.arange(num_samples)]
        counts[np.arange(num_samples), order] += 1
    expected = draws / num_samples
    chi2, freedom = ((counts - expected) ** 2 / expected).sum(), (num_samples - 1) ** 2
    assert abs(chi2 - freedom) < 5 * np.sqrt(2 * freedom)


def test_adjacent_samples_are_separated():
    order = EpochOrder(100_000, seed=0, epoch=0)[np.arange(100_000)]
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert np.mean(np.abs(np.diff(order)) == 1) < 1e-3


def test_250_million_samples_need_no_list():
    positions = np.array([0, 249_999_999])
    samples = EpochOrder(250_000_000, seed=0, epoch=0)[positions]
    assert samples.min() >= 0
    assert samples.max() < 250_000_000
