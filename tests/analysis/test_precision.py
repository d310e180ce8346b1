"""Precision of contacts, on maps small enough to count by hand; and by groups of structures."""

from pathlib import Path

import numpy as np
import pytest

from protlm.analysis.bootstrap import ratio_interval
from protlm.analysis.precision import (
    COLUMNS,
    DIVISORS,
    SEPARATIONS,
    Precisions,
    caption,
    group_scores,
    nearest_in_sequence,
    precision,
    precision_at,
    precisions,
    read_groups,
    scores,
    table_rows,
    top_pairs,
)
from protlm.analysis.structures import Structure
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
    contacts_LL, asked = random_contacts(50, density=0.5), 50 // divisor
    for predicted_LL, hits in ((contacts_LL * 1.0, asked), (1.0 - contacts_LL, 0)):
        found = precision(predicted_LL, contacts_LL, separation=separation, divisor=divisor)
        assert found == (hits, asked)
        assert precision_at(predicted_LL, contacts_LL, separation, divisor) == hits / asked


@pytest.mark.parametrize(
    ("name", "separations"), [("short", [6, 11]), ("medium", [12, 23]), ("long", [24, 39])]
)
def test_a_range_holds_its_separations_and_no_others(name: str, separations: list[int]) -> None:
    nearest, furthest = separations
    inside = [(0, nearest), (0, furthest), (1, nearest + 1)]
    outside = [(0, nearest - 1), (2, nearest + 1)] + [(0, furthest + 1)] * (furthest < 39)
    probabilities_LL = map_of(40, [*inside, *outside]) * 1.0
    rows, columns = top_pairs(probabilities_LL, map_of(40, inside), separation=SEPARATIONS[name])
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
    assert precision(contacts_LL * 0.5, contacts_LL, separation=(24, None)) == (3, 26)


def test_unresolved_residues_neither_compete_nor_count() -> None:
    contacts_LL = random_contacts(60, density=0.2)
    unresolved = [3, 17, 18, 40]
    hidden_LL = contacts_LL.copy()
    hidden_LL[unresolved] = hidden_LL[:, unresolved] = -1
    probabilities_LL = np.random.default_rng(1).random((60, 60))
    favored_LL = probabilities_LL.copy()
    favored_LL[unresolved] = favored_LL[:, unresolved] = 2.0
    for separation in SEPARATIONS.values():
        found = precision(favored_LL, hidden_LL, separation=separation)
        assert found == precision(probabilities_LL, hidden_LL, separation=separation)
        assert found[1] == 56
        rows, columns = top_pairs(favored_LL, hidden_LL, separation=separation)
        assert not set(unresolved) & {*rows.tolist(), *columns.tolist()}


def test_ties_fall_by_chance_and_always_alike() -> None:
    contacts_LL, same_LL = random_contacts(200, density=0.1), np.full((200, 200), 0.5)
    first, again = (top_pairs(same_LL, contacts_LL, separation=EVERYWHERE) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    # Both ends of the chain get their share.
    assert 40 < first[0].mean() < 93
    assert 0.03 < precision_at(same_LL, contacts_LL, EVERYWHERE) < 0.2


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
        assert precision(one_LL, one_LL, separation=(24, None)) == (0, 0)
        assert np.isnan(precision_at(one_LL, one_LL, (24, None)))
        assert precision(one_LL, one_LL, separation=(12, 24)) == (24, 24)
    tiny_LL, contacts_LL = map_of(3, []), random_contacts(60, density=0.5)
    found = scores([(tiny_LL * 1.0, tiny_LL), (contacts_LL * 1.0, contacts_LL)])
    assert found["long"]["P@L/5"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "count": 1}
    with pytest.raises(InputDataError, match="long enough"):
        scores([(tiny_LL * 1.0, tiny_LL)])


def protein(seed: int, signal: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    upper = np.triu(generator.random((60, 60)) < 0.1)
    contacts_LL = (upper | upper.T).astype(np.int8)
    return generator.random((60, 60)) + signal * contacts_LL, contacts_LL


def predictors(number: int) -> dict[str, Precisions]:
    """Proteins whose contacts the model predicts best, and nearness in the sequence worst."""
    signals = {"model": 0.9, "random_weights": 0.3, "nearest_in_sequence": 0.0}
    return {
        who: precisions(protein(seed, signal) for seed in range(number))
        for who, signal in signals.items()
    }


@pytest.mark.slow
def test_a_group_has_the_scores_of_its_members() -> None:
    proteins = [protein(seed) for seed in range(6)]
    group_of = ["near", "far", "far", "near", "far", "far"]
    one = precisions(proteins)
    found = group_scores({"model": one, "nearest_in_sequence": one}, group_of, seed=0)
    assert found["model"] == scores(proteins, seed=0)
    assert set(found["by_group"]) == {"near", "far"}
    assert found["by_group"]["near"]["model"] == scores([proteins[0], proteins[3]], seed=0)
    rows = table_rows(found, ["model"])
    assert {row[0] for row in rows} == {"model", "model, near", "model, far"}
    assert {len(row) for row in rows} == {1 + len(COLUMNS)}
    shortest = found["model"]["short"]["P@L"]
    assert rows[0][3] == f"{shortest['low']:.1%} to {shortest['high']:.1%}"


@pytest.mark.slow
def test_the_model_is_compared_with_the_best_baseline_protein_by_protein() -> None:
    # A use of the model's weights is not a baseline.
    compared = predictors(8)
    compared["model_mean_of_heads"] = compared["model"]
    found = group_scores(compared, ["near"] * 4 + ["far"] * 4, seed=0)
    for part, members in ((found, slice(0, 8)), (found["by_group"]["far"], slice(4, 8))):
        for separation, over in part["over_best_baseline"].items():
            model, best = (compared[w][separation]["P@L"] for w in ("model", "random_weights"))
            expected = ratio_interval((model - best)[members], seed=0)
            assert over == {"baseline": "random_weights", "metric": "P@L", **expected}
            assert 0 < over["low"] < over["mean"] < over["high"]
    # Equally good on each protein, whatever the spread between proteins.
    same = {"model": compared["model"], "random_weights": compared["model"]}
    for over in group_scores(same, None, seed=0)["over_best_baseline"].values():
        assert (over["low"], over["mean"], over["high"]) == (0, 0, 0)


@pytest.mark.slow
def test_the_caption_has_the_comparison_and_the_structures_left_out() -> None:
    found = group_scores(predictors(4), ["near", "near", "far", "far"], seed=0)
    found |= {"num_test": 4, "max_residues": 50}
    lines = caption({**found, "left_out": ["1abc_A", "2xyz_B"]}).splitlines()
    over = found["by_group"]["far"]["over_best_baseline"]["long"]
    assert lines[-1] == "left out, longer than 50 residues: 1abc_A, 2xyz_B"
    assert lines[5] == (
        f"P@L of the model minus that of random_weights, long, far: {over['mean']:+.1%} "
        f"({over['low']:+.1%} to {over['high']:+.1%})"
    )
    assert len(lines) == 3 * 3 + 1
    assert len(caption({**found, "left_out": []}).splitlines()) == 3 * 3


@pytest.mark.slow
def test_a_protein_without_a_pair_is_left_out_and_counted() -> None:
    proteins = [protein(seed) for seed in range(3)]
    one = precisions([*proteins, (np.ones((20, 20)), np.ones((20, 20), dtype=np.int8))])
    compared = {"model": one, "nearest_in_sequence": one}
    found = group_scores(compared, ["near", "near", "near", "far"], seed=0)
    assert found["model"]["long"] == scores(proteins, seed=0)["long"]
    assert found["model"]["medium"]["P@L"]["count"] == 4
    none = {"mean": None, "low": None, "high": None, "count": 0}
    assert found["by_group"]["far"]["model"]["long"]["P@L"] == none
    values = {**found, "num_test": 4, "left_out": [], "max_residues": 50}
    assert caption(values).splitlines()[-1] == (
        "left out of P@L, without a pair of long range: 1 of 4 proteins"
    )
    far = [row[2] for row in table_rows(found, ["model"]) if row[0] == "model, far"]
    assert far[-1] == "undefined"


def test_the_nearest_in_sequence_are_ranked_first() -> None:
    # Residues stand at six corners in turn, so that those 6, 12, ... apart are in contact.
    length = 60
    corners = 100 * np.eye(6, 3) + 50 * np.eye(6, 3, -3)
    places = corners[np.arange(length) % 6]
    turns = Structure("turns", "A" * length, places, np.repeat(places[:, None], 4, axis=1))
    found = scores(nearest_in_sequence([turns]), seed=0)
    # Of the nearest L pairs, the first are all that are 6 (24) apart; the next are no contacts.
    assert found["short"]["P@L"]["mean"] == (length - 6) / length
    assert found["long"]["P@L"]["mean"] == (length - 24) / length
    assert found["long"]["P@L/2"]["mean"] == 1


def test_groups_are_those_of_a_table_which_has_all_structures(tmp_path: Path) -> None:
    (tmp_path / "groups.tsv").write_text("structure\tgroup\n1abc_A\tnear\n")
    structures = [
        Structure(name, "MKV", np.zeros((3, 3)), np.zeros((3, 4, 3)))
        for name in ("1abc_A", "2xyz_B")
    ]
    assert read_groups(None, structures) is None
    assert "by_group" not in group_scores(predictors(2), None, seed=0)
    assert read_groups(tmp_path / "groups.tsv", structures[:1]) == ["near"]
    with pytest.raises(InputDataError, match="no group for 2xyz_B"):
        read_groups(tmp_path / "groups.tsv", structures)
