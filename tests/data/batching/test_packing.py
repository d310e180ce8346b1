"""Packed rows: every token once, in order; only the last row of a window is shorter."""

from dataclasses import replace

import numpy as np
import pytest

from protlm.data.batching.mixture import Mixture
from protlm.data.batching.plan import BatchStream
from protlm.data.batching.strategies import Packing
from protlm.data.shards.data_set import open_split
from protlm.data.vocabulary import VOCABULARY

WINDOW = 15


@pytest.fixture
def mixture(data_set):
    return Mixture([open_split(data_set, "train")])


def plans_of(mixture, rule):
    return list(BatchStream(mixture.lengths_of, mixture.order(seed=2), rule))


def stream_of(mixture, first):
    """The tokens of a window, sequence after sequence."""
    last = min(first + WINDOW, len(mixture))
    samples = mixture.order(seed=2).draw(0, np.arange(first, last)).samples
    return [token for s in samples for token in [*mixture[s].tolist(), VOCABULARY.eos]]


@pytest.mark.parametrize("max_length", [3, 64, 100, 5_000])
@pytest.mark.parametrize("tokens_per_batch", [1, 400])
def test_rows_are_the_stream_of_each_window_cut_in_pieces(mixture, max_length, tokens_per_batch):
    plans = plans_of(mixture, Packing(tokens_per_batch, max_length, window=WINDOW))
    found, windows = [], []
    for plan in plans:
        assert plan.length == max_length
        assert len(plan.rows) <= max(tokens_per_batch // max_length, 1)
        found += [row.read(mixture, seed=0)[0].tolist() for row in plan.rows]
        if plan.after.tokens == 0 and plan.after.samples % WINDOW == 0:
            windows.append(found)
            found = []
    assert len(windows) == 3
    for number, rows in enumerate(windows):
        assert [len(row) for row in rows[:-1]] == [max_length] * (len(rows) - 1)
        assert all(row[0] == VOCABULARY.cls for row in rows)
        joined = [token for row in rows for token in row[1:]]
        assert joined == stream_of(mixture, number * WINDOW)


def test_places_are_those_of_the_tokens(mixture):
    lengths = mixture.lengths_of(mixture.order(seed=2).draw(0, np.arange(40)).samples)
    ends = np.concatenate(([0], np.cumsum(lengths + 1)))
    done = 0
    for plan in plans_of(mixture, Packing(60, 30, window=40))[:-1]:
        done += 2 * 29
        assert ends[plan.after.samples] + plan.after.tokens == done
        assert plan.after.tokens <= lengths[plan.after.samples]


def test_rows_have_independent_random_numbers(mixture):
    plans = plans_of(mixture, Packing(60, 30, window=WINDOW))
    rows = [row for plan in plans for row in plan.rows]
    draws = {tuple(row.read(mixture, seed=0)[1].random(3)) for row in rows}
    assert len(draws) == len(rows)
    assert tuple(rows[5].read(mixture, seed=0)[1].random(3)) in draws
    for row, seed in ((rows[5], 1), (replace(rows[5], epoch=1), 0)):
        assert tuple(row.read(mixture, seed=seed)[1].random(3)) not in draws


def test_nothing_is_left_out():
    assert Packing(60, 30).left_out(np.array([10, 10**6]), 30).tolist() == [0, 0]
