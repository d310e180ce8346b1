"""The regression from attention maps to contacts, on planted and on real ones."""

import json
from pathlib import Path

import numpy as np
import pytest

from protlm.analysis.contact_regression import ContactRegression, apc, features, head_features
from protlm.analysis.precision import precision
from protlm.analysis.structures import read_structure, structure_files
from protlm.evaluation.base import NO_SPLIT
from protlm.evaluation.contacts import Contacts
from protlm.model.pretrained import PretrainedModel
from protlm.system.errors import InputDataError
from tests.small_models import small_model, structure_folder

pytestmark = pytest.mark.usefixtures("checked_shapes")
LAYERS = HEADS = 2


@pytest.fixture(scope="module")
def model() -> PretrainedModel:
    return small_model("softmax", max_length=256)


def protein(seed: int, *, length: int = 80, planted: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Eight maps of noise, [2, 4, L, L], one of which also sees the contacts; and the contacts."""
    generator = np.random.default_rng(seed)
    upper_LL = np.triu(generator.random((length, length)) < 0.05, 1)
    contacts_LL = (upper_LL | upper_LL.T).astype(np.int8)
    maps_NHLL = generator.random((2, 4, length, length))
    maps_NHLL[planted // 4, planted % 4] += upper_LL * 0.7
    return maps_NHLL, contacts_LL


def examples(*seeds: int) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(features(maps_NHLL), contacts_LL) for maps_NHLL, contacts_LL in map(protein, seeds)]


def test_apc_removes_what_rows_and_columns_explain() -> None:
    generator = np.random.default_rng(0)
    rank_one = np.einsum("hi,hj->hij", generator.random((3, 7)), generator.random((3, 7)))
    np.testing.assert_allclose(apc(rank_one), 0.0, atol=1e-12)
    maps = generator.random((3, 7, 7))
    corrected = apc(maps)
    np.testing.assert_allclose(corrected.sum(-1), 0.0, atol=1e-12)
    np.testing.assert_allclose(corrected.sum(-2), 0.0, atol=1e-12)
    by_hand = maps[1, 2, 4] - maps[1, 2].sum() * maps[1, :, 4].sum() / maps[1].sum()
    assert corrected[1, 2, 4] == pytest.approx(by_hand)
    np.testing.assert_array_equal(apc(np.zeros((2, 4, 4))), np.zeros((2, 4, 4)))


def test_the_regression_finds_the_head_that_sees_contacts() -> None:
    regression = ContactRegression().fit(examples(0, 1, 2))
    weights = np.abs(regression.weights_H)
    assert weights.argmax() == 3
    assert weights[3] > 10 * np.delete(weights, 3).max()
    for features_HLL, contacts_LL in examples(10, 11):
        probabilities_LL = regression.predict(features_HLL)
        assert 0.0 <= probabilities_LL.min() <= probabilities_LL.max() <= 1.0
        np.testing.assert_allclose(probabilities_LL, probabilities_LL.T, atol=1e-6)
        hits, count = precision(probabilities_LL, contacts_LL, separation=(6, None), divisor=2)
        # One pair in twenty is a contact.
        assert hits / count > 0.5


def test_scaled_features_find_a_head_whose_maps_are_nearly_flat() -> None:
    flat = [(1e-4 * features_HLL, contacts_LL) for features_HLL, contacts_LL in examples(0, 1, 2)]
    assert ContactRegression(scaled=False).fit(flat).num_heads_used == 0
    scaled = ContactRegression().fit(flat)
    assert np.abs(scaled.weights_H).argmax() == 3
    # The scale of the maps makes no difference.
    whole = ContactRegression().fit(examples(0, 1, 2))
    np.testing.assert_allclose(1e-4 * scaled.weights_H, whole.weights_H, rtol=0.01, atol=1e-4)


def test_a_uniform_map_has_no_features_but_for_rounding() -> None:
    generator = np.random.default_rng(0)
    maps_NHLL, contacts_LL = protein(0)
    ulp = np.finfo(np.float32).eps
    noise_LL = generator.integers(-1, 2, maps_NHLL.shape[-2:]) * ulp
    maps_NHLL[0, 0] = ((1 + noise_LL) / 80).astype(np.float32)
    found_HLL = features(maps_NHLL)
    assert not found_HLL[0].any() and found_HLL[1:].any(axis=(1, 2)).all()
    assert ContactRegression().fit([(found_HLL, contacts_LL)]).weights_H[0] == 0
    assert ContactRegression().fit([(found_HLL[:1], contacts_LL)]).num_heads_used == 0


def test_probabilities_are_those_of_the_solver() -> None:
    from sklearn.linear_model import LogisticRegression

    (features_HLL, contacts_LL), *_ = examples(0)
    regression = ContactRegression(scaled=False).fit([(features_HLL, contacts_LL)])
    rows, columns = np.triu_indices(80, 6)
    solver = LogisticRegression(solver="liblinear", l1_ratio=1.0, C=0.15, random_state=0)
    pairs = features_HLL[:, rows, columns].T
    solver.fit(pairs, contacts_LL[rows, columns])
    expected = solver.predict_proba(pairs)[:, 1]
    found = regression.predict(features_HLL)[rows, columns]
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def fitted(*given: tuple[np.ndarray, np.ndarray]) -> tuple[list[float], float]:
    found = ContactRegression(seed=3).fit(given)
    return found.weights_H.tolist(), found.intercept


def test_near_and_unresolved_pairs_do_not_teach() -> None:
    (features_HLL, contacts_LL), *_ = examples(0)
    distance_LL = np.abs(np.subtract.outer(np.arange(80), np.arange(80)))
    near_LL = np.where(distance_LL < 6, 1 - contacts_LL, contacts_LL)
    assert fitted((features_HLL, near_LL)) == fitted((features_HLL, contacts_LL))
    hidden_LL = contacts_LL.copy()
    hidden_LL[40:] = hidden_LL[:, 40:] = -1
    halves = (features_HLL[:, :40, :40], contacts_LL[:40, :40])
    assert fitted((features_HLL, hidden_LL)) == fitted(halves)


def test_the_regression_is_the_same_each_time() -> None:
    assert fitted(*examples(0, 1)) == fitted(*examples(0, 1))


def test_nothing_to_learn_from_is_refused() -> None:
    maps_NHLL, contacts_LL = protein(0)
    for given in ([], [(features(maps_NHLL), np.zeros_like(contacts_LL))]):
        with pytest.raises(InputDataError, match="give more structures"):
            ContactRegression().fit(given)


def test_head_features_are_those_of_the_residues(model: PretrainedModel) -> None:
    sequence = "MKTAYIAKQRQISFVKSHFSRQ"
    found = head_features(model, sequence)
    assert found.shape == (LAYERS * HEADS, len(sequence), len(sequence))
    maps = model.attention_maps(model.tokenize([sequence]))
    for layer in range(LAYERS):
        for head in range(HEADS):
            map_LL = maps[layer + 1][0, head, 1:-1, 1:-1].double().numpy()
            np.testing.assert_allclose(
                found[HEADS * layer + head], apc(map_LL + map_LL.T), atol=1e-6
            )


@pytest.mark.slow
def test_contacts_are_reported_beside_random_weights_and_the_mean_of_heads(
    model: PretrainedModel, tmp_path: Path
) -> None:
    fit, test = structure_folder(tmp_path, "fit", 3), structure_folder(tmp_path, "test", 4)
    evaluation = Contacts(structures=test, fit_structures=fit, max_residues=110)
    found = evaluation.run(model, None)
    lengths = {
        structure.identifier: len(structure)
        for folder in (fit, test)
        for structure in map(read_structure, structure_files(Path(folder)))
    }
    too_long = {name for name, length in lengths.items() if length > 110}
    assert too_long and set(found["left_out"]) == too_long
    assert found["num_fit"] + found["num_test"] + len(too_long) == len(lengths) == 7
    for who in ("model", "random_weights"):
        mean = found[f"{who}_mean_of_heads"]
        assert mean["long"]["P@L"]["count"] == found["num_test"]
        assert set(found[who]) == {"short", "medium", "long"}
        assert found[who]["long"]["P@L"]["count"] == found["num_test"]
        assert 0 <= found["heads_used"][who] <= LAYERS * HEADS
    assert found["nearest_in_sequence"]["long"]["P@L"]["count"] == found["num_test"]
    assert set(found["over_best_baseline"]) == {"short", "medium", "long"}
    assert json.loads(json.dumps(found)) == evaluation.run(model, None)
    table = evaluation.table({NO_SPLIT: found})
    assert {len(row) for row in table.rows} == {len(table.columns)}
    assert f"left out, longer than 110 residues: {', '.join(found['left_out'])}" in table.caption


def test_unusable_folders_are_rejected(model: PretrainedModel, tmp_path: Path) -> None:
    fit = structure_folder(tmp_path, "fit", 2)
    for asked, told in (
        (Contacts(structures=fit, fit_structures=fit), "fit to other proteins"),
        (Contacts(structures=fit, fit_structures=fit, max_residues=50), "of at most 50 residues"),
        (Contacts(structures=str(tmp_path / "no"), fit_structures=fit), "no such folder"),
    ):
        with pytest.raises(InputDataError, match=told):
            asked.run(model, None)


@pytest.mark.slow
def test_structures_longer_than_the_model_are_excluded(tmp_path: Path) -> None:
    fit, test = structure_folder(tmp_path, "fit", 3), structure_folder(tmp_path, "test", 4)
    short = small_model("softmax", max_length=112)
    found = Contacts(structures=test, fit_structures=fit).run(short, None)
    assert found["max_residues"] == 110
    assert found["left_out"]
