"""Precision of contacts, on maps small enough to count by hand."""

import numpy as np
import pytest

from protlm.analysis.precision import DIVISORS, SEPARATIONS, precision, scores, top_pairs
from protlm.system.errors import InputDataError

pytestmark = pytest.mark.usefixtures("checked_shapes")
EVERYWHERE = (0, None)


def map_of(length: int, pairs: list[tuple[int, int]]) -> np.ndarray:
    contacts_LL = np.zeros((length, length), dtype=np.int8)
    for i, j in pairs:
        contacts_LL[i, j] = contacts_LL[j, i] = 1
    return contacts_LL


def random_contacts(length: int, *, density: float, seed: int = 0) -> np.ndarray:
    upper = np.triu(np.random.default_rng(seed).random((length, length)) < density, 1)
    return (upper | upper.T).astype(np.int8)


@pytest.mark.parametrize("separation", SEPARATIONS.values(), ids=list(SEPARATIONS))
@pytest.mark.parametrize("divisor", DIVISORS.values())
def test_perfect_and_inverted_predictions(separation: tuple[int, int | None], divisor: int) -> None:
    contacts_LL = random_contacts(50, density=0.5)
    hits, count = precision(contacts_LL * 1.0, contacts_LL, separation=separation, divisor=divisor)
    assert (hits, count) == (50 // divisor, 50 // divisor)
    assert precision(1.0 - contacts_LL, contacts_LL, separation=separation, divisor=divisor) == (
        0,
        count,
    )


@pytest.mark.parametrize(
    ("name", "separations"), [("short", [6, 11]), ("medium", [12, 23]), ("long", [24, 39])]
)
def test_a_range_holds_its_separations_and_no_others(name: str, separations: list[int]) -> None:
    nearest, furthest = separations
    inside = [(0, nearest), (0, furthest), (1, nearest + 1)]
    outside = [(0, nearest - 1), (2, nearest + 1)] + [(0, furthest + 1)] * (furthest < 39)
    probabilities_LL = map_of(40, [*inside, *outside]) * 1.0
    contacts_LL = map_of(40, inside)
    rows, columns = top_pairs(probabilities_LL, contacts_LL, separation=SEPARATIONS[name])
    assert set(zip(rows[:3].tolist(), columns[:3].tolist(), strict=True)) == set(inside)
    assert set((columns - rows).tolist()) <= set(range(nearest, furthest + 1))


def test_the_most_probable_pairs_come_first() -> None:
    contacts_LL = map_of(10, [(0, 9), (1, 7), (2, 8)])
    probabilities_LL = np.zeros((10, 10))
    probabilities_LL[0, 9], probabilities_LL[2, 9], probabilities_LL[1, 7] = 0.9, 0.8, 0.7
    # What stands below the diagonal is not asked.
    probabilities_LL[8, 2] = 1.0
    for divisor, expected in {10: (1, 1), 5: (1, 2), 3: (2, 3)}.items():
        found = precision(probabilities_LL, contacts_LL, separation=(6, None), divisor=divisor)
        assert found == expected


def test_missing_candidates_count_as_wrong() -> None:
    # Of 26 residues three pairs are 24 or more apart, but 26 are asked for.
    contacts_LL = np.ones((26, 26), dtype=np.int8)
    assert precision(contacts_LL * 0.5, contacts_LL, separation=(24, None), divisor=1) == (3, 26)


def test_unresolved_residues_neither_compete_nor_count() -> None:
    contacts_LL = random_contacts(60, density=0.2)
    unresolved = [3, 17, 18, 40]
    hidden_LL = contacts_LL.copy()
    hidden_LL[unresolved] = hidden_LL[:, unresolved] = -1
    probabilities_LL = np.random.default_rng(1).random((60, 60))
    favored_LL = probabilities_LL.copy()
    favored_LL[unresolved] = favored_LL[:, unresolved] = 2.0
    for separation in SEPARATIONS.values():
        found = precision(favored_LL, hidden_LL, separation=separation, divisor=1)
        assert found == precision(probabilities_LL, hidden_LL, separation=separation, divisor=1)
        assert found[1] == 56
        rows, columns = top_pairs(favored_LL, hidden_LL, separation=separation)
        assert not set(unresolved) & {*rows.tolist(), *columns.tolist()}


def test_ties_fall_by_chance_and_always_alike() -> None:
    contacts_LL = random_contacts(200, density=0.1)
    same_LL = np.full((200, 200), 0.5)
    first = top_pairs(same_LL, contacts_LL, separation=EVERYWHERE)
    again = top_pairs(same_LL, contacts_LL, separation=EVERYWHERE)
    np.testing.assert_array_equal(first, again)
    # Both ends of the chain get their share.
    assert 40 < first[0].mean() < 93
    hits, count = precision(same_LL, contacts_LL, separation=EVERYWHERE, divisor=1)
    assert 0.03 < hits / count < 0.2


def test_scores_are_means_over_proteins() -> None:
    contacts_LL = random_contacts(60, density=0.5)
    right, wrong = (contacts_LL * 1.0, contacts_LL), (1.0 - contacts_LL, contacts_LL)
    found = scores([right, right, right, wrong])
    assert set(found) == set(SEPARATIONS)
    for by_divisor in found.values():
        assert set(by_divisor) == set(DIVISORS)
        for values in by_divisor.values():
            assert values["mean"] == 0.75 and values["count"] == 4
            assert 0.0 <= values["low"] < 0.75 < values["high"] <= 1.0
    assert found == scores([right, right, right, wrong])
    assert scores([right])["long"]["P@L"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "count": 1}


def test_proteins_too_short_for_a_pair_are_not_counted() -> None:
    # One residue less than the range needs, or all of one side unresolved.
    short_LL, hidden_LL = np.ones((24, 24)), np.ones((60, 60))
    hidden_LL[24:] = hidden_LL[:, 24:] = -1
    for one_LL in (short_LL, hidden_LL):
        assert precision(one_LL, one_LL, separation=(24, None), divisor=1) == (0, 0)
        assert precision(one_LL, one_LL, separation=(12, 24), divisor=1) == (24, 24)
    tiny_LL, contacts_LL = map_of(3, []), random_contacts(60, density=0.5)
    found = scores([(tiny_LL * 1.0, tiny_LL), (contacts_LL * 1.0, contacts_LL)])
    assert found["long"]["P@L/5"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "count": 1}
    with pytest.raises(InputDataError, match="long enough"):
        scores([(tiny_LL * 1.0, tiny_LL)])
