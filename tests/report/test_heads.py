"""The content of a page: heads, predictions and structure, against slow or known values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import protlm
from protlm.analysis.contact_regression import features
from protlm.analysis.precision import SEPARATIONS, precision
from protlm.analysis.structures import contact_map, read_structure
from protlm.data.vocabulary import STANDARD, VOCABULARY
from protlm.model.pretrained import PretrainedModel
from protlm.report import heads as module
from protlm.report.heads import STATISTICS, Codes, inspected_heads
from protlm.report.protein import InspectedProtein, predicted_distributions
from tests.small_models import shortest_structures

SEQUENCE = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ"
PROTEIN = InspectedProtein("P1", "P1 one", "x.fasta", SEQUENCE)
ALL: dict[str, Any] = {"layers": (1, 2), "heads": (1, 2)}


@pytest.fixture(scope="module")
def model(tiny_run: Path) -> PretrainedModel:
    """The `tiny` model: two layers of two heads."""
    return protlm.load(tiny_run)


def test_full_maps_are_those_of_the_model(model: PretrainedModel) -> None:
    found = inspected_heads(model, PROTEIN, **ALL)
    assert [(head.layer, head.head) for head in found] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    maps = model.attention_maps(model.tokenize([SEQUENCE]))
    for head in found:
        map_LL = maps[head.layer][0, head.head - 1, 1:-1, 1:-1].numpy()
        assert head.full is not None
        shown_LL = head.full.codes.decode()
        np.testing.assert_allclose(shown_LL, map_LL, atol=head.full.error * (1 + 1e-6))
        assert head.full.error <= map_LL.max() / 255
        rows, columns, weights = zip(*head.pairs, strict=True)
        apart = np.abs(np.subtract.outer(range(33), range(33))) >= 6
        expected = np.sort(map_LL[apart])[::-1][:20]
        np.testing.assert_allclose(weights, expected, rtol=1e-5)
        np.testing.assert_allclose(map_LL[rows, columns], expected, rtol=1e-5)
        received = Codes.of(map_LL.mean(axis=0))
        np.testing.assert_allclose(head.received.decode(), received.decode(), rtol=1e-4)
        # The rows of a map with its special tokens sum to 1.
        assert head.statistics["sink_mass"] == pytest.approx(1 - map_LL.sum(1).mean(), abs=1e-5)


# Of 33 residues a full map has 1,452 bytes, and one of at most 9 × 9 cells 108.
@pytest.mark.parametrize(
    ("most", "options", "kept"),
    [
        (4 * 1_452, {}, 4),
        (4 * 1_452 - 1, {}, 3),
        (4 * 1_452, {"num_models": 2}, 1),
        (1, {}, 1),
        (1, {"keep_full": True}, 4),
    ],
)
def test_only_the_best_maps_stay_full(
    most: int, options: Any, kept: int, model: PretrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_OVERVIEW_SIDE", 9)
    monkeypatch.setattr(module, "_COMFORTABLE_BYTES", most)
    found = inspected_heads(model, PROTEIN, **ALL, **options)
    best = sorted(found, key=lambda head: -head.rank)[:kept]
    assert {id(head) for head in found if head.full} == {*map(id, best)}
    for head in found:
        plain = head.to_plain()
        assert plain["bin"] == (1 if head.full else 4)
        assert len(plain["statistics"]) == len(STATISTICS)
        assert head.reduced.codes.codes.shape == (9, 9)
    monkeypatch.setattr(module, "_MOST_FULL_MAPS", 2)
    found = inspected_heads(model, PROTEIN, **ALL, **options)
    assert sum(head.full is not None for head in found) == (kept if kept == 4 else min(kept, 2))


def test_chosen_heads_keep_their_numbers(model: PretrainedModel) -> None:
    [head] = inspected_heads(model, PROTEIN, layers=(2,), heads=(2,))
    assert (head.layer, head.head) == (2, 2)
    everything = inspected_heads(model, PROTEIN, **ALL)
    assert head.to_plain() == everything[-1].to_plain()


@pytest.mark.parametrize("length", [1, 2, 6, 7])
def test_short_proteins_have_a_page(length: int, model: PretrainedModel) -> None:
    protein = InspectedProtein("P1", "", "x.fasta", SEQUENCE[:length])
    for head in inspected_heads(model, protein, **ALL):
        assert len(head.to_plain()["pairs"]) == max(length - 6, 0) * 2


def test_precision_and_contrast_of_a_head(model: PretrainedModel) -> None:
    (path,) = shortest_structures("test", 1)
    structure = read_structure(path)
    protein = InspectedProtein("P1", "", path.name, structure.sequence, structure)
    [head] = inspected_heads(model, protein, layers=(1,), heads=(1,))
    maps = model.attention_maps(model.tokenize([structure.sequence]), [1], [1])
    feature_LL = features(maps[1][0, None, :, 1:-1, 1:-1].numpy())[0]
    known_LL = contact_map(structure)
    hits, asked = precision(feature_LL, known_LL, separation=SEPARATIONS["long"], divisor=1)
    assert head.statistics["precision"] == hits / asked == head.rank
    pairs = [feature_LL[i, j] for i in range(len(protein)) for j in range(i + 6, len(protein))]
    z = (np.array(pairs) - np.mean(pairs)) / np.std(pairs)
    expected = np.sort(z)[-len(protein) :].mean()
    assert head.statistics["contrast"] == pytest.approx(expected, rel=1e-3)
    plain = protein.to_plain()["structure"]
    i, j = plain["contacts"][0]
    assert known_LL[i, j] == 1 and j - i >= 3
    assert len(plain["ca"]) == len(plain["cb"]) == len(plain["states"]) == len(protein)


def test_predictions_are_those_with_one_residue_masked(model: PretrainedModel) -> None:
    p_L20 = predicted_distributions(model, SEQUENCE)
    np.testing.assert_allclose(p_L20.sum(axis=1), 1, rtol=1e-12)
    batch = model.tokenize([SEQUENCE])
    batch.tokens_BL[0, 5] = VOCABULARY.mask
    letters = [VOCABULARY[letter] for letter in STANDARD]
    expected = model(batch).logits_BLV[0, 5, letters].double().softmax(-1)
    np.testing.assert_allclose(p_L20[4], expected, rtol=1e-4)


def test_predictions_of_a_causal_model_do_not_depend_on_the_rest(
    train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    run = train_tiny(tmp_path / "causal", "objective=causal", "trainer.max_steps=2")
    model = protlm.load(run)
    whole = predicted_distributions(model, SEQUENCE)
    part = predicted_distributions(model, SEQUENCE[:10] + "W" * 10)
    assert whole.shape == (33, 20)
    np.testing.assert_allclose(whole[:11], part[:11], rtol=1e-4)
    assert not np.allclose(whole[11:20], part[11:20], rtol=1e-4)
