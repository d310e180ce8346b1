"""Batches of labeled proteins: their labels, and their division between processes."""

from collections.abc import Iterator

import numpy as np
import pytest

from protlm.data.vocabulary import VOCABULARY
from protlm.training.labeled_batches import Batches, LabeledTokens, TokenRows

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
    """Their labels are those of one process, weighted by the labels of the whole batch."""
    whole = Batches(data, 2, seed=3)
    parts = [Batches(data, 2, seed=3) for _ in range(2)]
    for rank, one in enumerate(parts):
        one.share = (rank, 2)
    for batch, *mine in zip(all_of(whole), *map(all_of, parts), strict=True):
        used = [one for one in mine if one.weight]
        assert sorted(batch.rows) == sorted(np.concatenate([one.rows for one in used]))
        assert {one.weight for one in used} == {batch.weight} == {1 / len(batch.rows)}
    # The last batch has one protein: the other process computes it too, with no weight.
    assert [parts[rank][2].weight > 0 for rank in (0, 1)] == [True, False]
    assert len(parts[1][2].values)


def test_proteins_have_one_label_each() -> None:
    tokens = [VOCABULARY.encode(one) for one in SEQUENCES]
    batch = Batches(LabeledTokens(tokens, np.arange(5)), 4, seed=None)[0]
    assert batch.is_label_BL is None
    assert (batch.values.tolist(), batch.weight) == ([0, 1, 2, 3], 0.25)
