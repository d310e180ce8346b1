"""Batches of labeled proteins: their labels, and their division between processes."""

from collections.abc import Iterator
from itertools import chain

import numpy as np
import pytest

from protlm.data.vocabulary import VOCABULARY
from protlm.training.labels import Batches, LabeledTokens, TokenRows

SEQUENCES = ["MKTAY", "MKT", "WWSGKWL", "ACD", "MKTAYIA"]
PLACES = [np.array([0, 4]), np.array([1]), np.array([2, 3, 6]), np.arange(3), np.array([6])]


@pytest.fixture
def data() -> LabeledTokens:
    """Labels that say their protein and their position: 10 · protein + position."""
    values = np.concatenate([10 * row + places for row, places in enumerate(PLACES)])
    return LabeledTokens([VOCABULARY.encode(one) for one in SEQUENCES], values, PLACES)


def all_of(batches: Batches) -> Iterator[TokenRows]:
    return (batches[number] for number in range(len(batches)))


def test_labels_are_those_of_their_residues(data: LabeledTokens) -> None:
    for batch in all_of(Batches(data, 2, seed=3)):
        assert batch.is_label_BL is not None
        letters = [
            VOCABULARY.decode(tokens[is_label].numpy())
            for tokens, is_label in zip(batch.tokens_BL, batch.is_label_BL, strict=True)
        ]
        values = batch.values.tolist()
        assert "".join(letters) == "".join(SEQUENCES[n // 10][n % 10] for n in values)
        assert data.values[batch.rows].tolist() == values
        assert data.groups[batch.rows].tolist() == [n // 10 for n in values]


def test_processes_divide_each_batch(data: LabeledTokens) -> None:
    whole = Batches(data, 2, seed=3)
    parts = [Batches(data, 2, seed=3, share=(rank, 2)) for rank in range(2)]
    for batch, *mine in zip(all_of(whole), *map(all_of, parts), strict=True):
        used = [one.rows for one in mine if one.is_used]
        assert sorted(batch.rows) == sorted(np.concatenate(used))
    # The last batch has one protein: the other process computes it too, and it does not count.
    assert [part[2].is_used for part in parts] == [True, False]
    assert len(parts[1][2].values)


def test_each_epoch_has_all_proteins_in_another_order(data: LabeledTokens) -> None:
    batches = Batches(data, 2, seed=3)
    first, second = ([batches[n].rows.tolist() for n in ns] for ns in (range(3), range(3, 6)))
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(len(data.values)))
    assert first != second
    assert [batches[n].place for n in (0, 2, 4)] == [(0, 0, 0), (0, 2, 0), (1, 1, 0)]


def test_proteins_have_one_label_each() -> None:
    tokens = [VOCABULARY.encode(one) for one in SEQUENCES]
    batch = Batches(LabeledTokens(tokens, np.arange(5)), 4, seed=None)[0]
    assert batch.is_label_BL is None
    assert batch.values.tolist() == [0, 1, 2, 3]
