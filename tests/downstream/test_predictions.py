"""Predictions of chosen positions: batches, windows around a position, and causal sequences."""

import numpy as np
import pytest

from protlm.data.vocabulary import VOCABULARY
from protlm.downstream.estimators import Predictor, Query
from protlm.system.errors import UserError
from tests.small_models import log_p_of, small_model, tokens_of, watched_batches

pytestmark = pytest.mark.usefixtures("checked_shapes")
SEQUENCES = ["MKTAYIAKQR", "MKTAYIAKQRQISFVK", "MENDELMENDELMENDEL"]
WINDOW = 12


@pytest.mark.parametrize("tokens_per_batch", [1, 40, 1000])
def test_batches_keep_the_order_and_the_budget(
    tokens_per_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model("softmax")
    batches = watched_batches(model, monkeypatch)
    queries = [Query(one, i, masked=i % 3 > 0) for one in SEQUENCES for i in range(len(one))]
    found = list(Predictor(model, tokens_per_batch).log_p(iter(queries)))
    assert [query for query, _ in found] == queries
    assert all(len(one) == 1 or one.numel() <= tokens_per_batch for one in batches)
    assert (len(batches) == 3) == (tokens_per_batch == 1000)
    monkeypatch.undo()
    for query, log_p_V in found:
        tokens = tokens_of(query.sequence)
        if query.masked:
            tokens[query.position + 1] = VOCABULARY.mask
        np.testing.assert_allclose(log_p_V, log_p_of(model, tokens)[query.position + 1], atol=1e-9)


@pytest.mark.parametrize("masked", [True, False])
def test_a_long_protein_is_read_through_windows(masked: bool) -> None:
    model = small_model("softmax", max_length=WINDOW)
    sequence = SEQUENCES[-1]
    positions = range(len(sequence))
    predictor = Predictor(model, 40)
    if masked:
        found = {q.position: p for q, p in predictor.log_p(Query(sequence, i) for i in positions)}
    else:
        (found,) = predictor.unmasked_log_p([(sequence, positions)])
    for position in positions:
        tokens = tokens_of(sequence)
        if masked:
            tokens[position + 1] = VOCABULARY.mask
        # Centered where there are six tokens on both sides, else at the end.
        start = min(max(position + 1 - 6, 0), len(tokens) - WINDOW)
        expected_LV = log_p_of(model, tokens[start : start + WINDOW])
        np.testing.assert_allclose(found[position], expected_LV[position + 1 - start], atol=1e-9)


def test_a_protein_that_fits_is_read_whole() -> None:
    model = small_model("softmax", max_length=WINDOW)
    sequence = SEQUENCES[0]
    assert len(sequence) + 2 == WINDOW
    log_p_LV = log_p_of(model, tokens_of(sequence))
    (found,) = Predictor(model).unmasked_log_p([(sequence, [3, 0])])
    assert set(found) == {0, 3}
    np.testing.assert_allclose(found[3], log_p_LV[4], atol=1e-9)
    np.testing.assert_allclose(found[0], log_p_LV[1], atol=1e-9)


@pytest.mark.parametrize("tokens_per_batch", [1, 40, 1000])
def test_unmasked_sequences_of_a_length_share_a_batch(
    tokens_per_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model("softmax")
    sequences = [*SEQUENCES, SEQUENCES[-1][::-1]]
    expected = [log_p_of(model, tokens_of(sequence))[1:-1] for sequence in sequences]
    batches = watched_batches(model, monkeypatch)
    asked = ((sequence, [5, 0, len(sequence) - 1]) for sequence in sequences)
    found = list(Predictor(model, tokens_per_batch).unmasked_log_p(asked))
    assert all(len(one) == 1 or one.numel() <= tokens_per_batch for one in batches)
    assert sum(map(len, batches)) == 4
    assert (len(batches) == 3) == (tokens_per_batch >= 40)
    for sequence, log_p, expected_LV in zip(sequences, found, expected, strict=True):
        assert list(log_p) == [5, 0, len(sequence) - 1]
        for position, log_p_V in log_p.items():
            np.testing.assert_allclose(log_p_V, expected_LV[position], atol=1e-9)


@pytest.mark.parametrize("attention", ["softmax", "performer_relu"])
@pytest.mark.parametrize("tokens_per_batch", [1, 40, 1000])
def test_causal_probabilities_do_not_depend_on_the_batch(
    attention: str, tokens_per_batch: int
) -> None:
    model = small_model(attention, "causal")
    found = list(Predictor(model, tokens_per_batch).causal_log_p(iter(SEQUENCES)))
    assert len(found) == len(SEQUENCES)
    for sequence, log_p_L in zip(SEQUENCES, found, strict=True):
        tokens = tokens_of(sequence)
        expected_LV = log_p_of(model, tokens)
        expected = [expected_LV[i, token] for i, token in enumerate(tokens[1:])]
        np.testing.assert_allclose(log_p_L, expected, atol=1e-9)


def test_a_causal_model_reads_no_windows() -> None:
    predictor = Predictor(small_model("softmax", "causal", max_length=WINDOW))
    with pytest.raises(UserError, match="16 residues is longer than the 10"):
        list(predictor.causal_log_p(SEQUENCES[:2]))
