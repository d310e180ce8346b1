"""Precision by groups of structures."""

from pathlib import Path

import numpy as np
import pytest

from protlm.analysis.precision import scores
from protlm.analysis.structure_groups import (
    by_predictor,
    nearest_in_sequence,
    read_groups,
    scores_by_group,
    table_rows,
)
from protlm.analysis.structures import Structure
from protlm.errors import InputDataError


def structure(name: str) -> Structure:
    return Structure(name, "MKV", np.zeros((3, 3)), np.zeros((3, 4, 3)))


def protein(seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    contacts = np.triu(generator.random((60, 60)) < 0.1)
    return generator.random((60, 60)), (contacts | contacts.T).astype(np.int8)


def test_a_group_has_the_scores_of_its_members() -> None:
    proteins = [protein(seed) for seed in range(6)]
    group_of = ["near", "far", "far", "near", "far", "far"]
    found = scores_by_group(proteins, group_of, seed=0)
    assert found["all"] == scores(proteins, seed=0)
    assert found["near"] == scores([proteins[0], proteins[3]], seed=0)
    assert set(found) == {"all", "near", "far"}
    plain = by_predictor({"model": found})
    assert plain["by_group"]["far"]["model"] == found["far"]
    names = {row[0] for row in table_rows(plain, ["model"])}
    assert names == {"model", "model, near", "model, far"}


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
    assert "by_group" not in by_predictor({"model": scores_by_group([protein(0)], None, seed=0)})


def test_a_structure_without_a_group_is_reported(tmp_path: Path) -> None:
    (tmp_path / "groups.tsv").write_text("structure\tgroup\n1abc_A\tnear\n")
    structures = [structure("1abc_A"), structure("2xyz_B")]
    assert read_groups(tmp_path / "groups.tsv", structures[:1]) == ["near"]
    with pytest.raises(InputDataError, match="no group for 2xyz_B"):
        read_groups(tmp_path / "groups.tsv", structures)
