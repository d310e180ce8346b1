"""Precision by groups of structures."""

from pathlib import Path

import numpy as np
import pytest

from protlm.analysis.bootstrap import ratio_interval
from protlm.analysis.precision import precisions, scores
from protlm.analysis.structure_groups import (
    COLUMNS,
    Precisions,
    caption,
    group_scores,
    nearest_in_sequence,
    read_groups,
    table_rows,
)
from protlm.analysis.structures import Structure
from protlm.system.errors import InputDataError


def structure(name: str) -> Structure:
    return Structure(name, "MKV", np.zeros((3, 3)), np.zeros((3, 4, 3)))


def protein(seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    contacts = np.triu(generator.random((60, 60)) < 0.1)
    return generator.random((60, 60)), (contacts | contacts.T).astype(np.int8)


def predictors(number: int) -> dict[str, Precisions]:
    """Proteins whose contacts the model predicts best, and nearness in the sequence worst."""
    found = {}
    for who, signal in (("model", 0.9), ("random_weights", 0.3), ("nearest_in_sequence", 0.0)):
        proteins = [protein(seed) for seed in range(number)]
        found[who] = precisions([(noise + signal * c, c) for noise, c in proteins])
    return found


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


def test_the_model_is_compared_with_the_best_baseline_protein_by_protein() -> None:
    group_of = ["near"] * 4 + ["far"] * 4
    compared = predictors(8)
    # A use of the model's weights is not a baseline.
    compared["model_mean_of_heads"] = compared["model"]
    found = group_scores(compared, group_of, seed=0)
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


def test_the_caption_has_the_comparison_and_the_structures_left_out() -> None:
    found = group_scores(predictors(4), ["near", "near", "far", "far"], seed=0)
    found |= {"num_test": 4, "max_residues": 50}
    lines = caption({**found, "left_out": ["1abc_A", "2xyz_B"]}).splitlines()
    over = found["by_group"]["far"]["over_best_baseline"]["long"]
    assert lines[-1] == "left out, longer than 50 residues: 1abc_A, 2xyz_B"
    assert lines[5] == (
        f"P@L of the model less that of random_weights, long, far: {over['mean']:+.1%} "
        f"({over['low']:+.1%} to {over['high']:+.1%})"
    )
    assert len(lines) == 3 * 3 + 1
    assert len(caption({**found, "left_out": []}).splitlines()) == 3 * 3


def test_a_protein_without_a_pair_is_left_out_and_counted() -> None:
    proteins = [protein(seed) for seed in range(3)]
    short = (np.ones((20, 20)), np.ones((20, 20), dtype=np.int8))
    one = precisions([*proteins, short])
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
    assert [row[2] for row in table_rows(found, ["model"]) if row[0] == "model, far"][-1] == "–"


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


def test_without_a_table_there_are_no_groups() -> None:
    assert read_groups(None, [structure("1abc_A")]) is None
    assert "by_group" not in group_scores(predictors(2), None, seed=0)


def test_a_structure_without_a_group_is_reported(tmp_path: Path) -> None:
    (tmp_path / "groups.tsv").write_text("structure\tgroup\n1abc_A\tnear\n")
    structures = [structure("1abc_A"), structure("2xyz_B")]
    assert read_groups(tmp_path / "groups.tsv", structures[:1]) == ["near"]
    with pytest.raises(InputDataError, match="no group for 2xyz_B"):
        read_groups(tmp_path / "groups.tsv", structures)
