"""Predictions of chosen positions: batches, windows around a position, and causal sequences."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from protlm.data.vocabulary import VOCABULARY
from protlm.downstream.predictions import Predictor, Query
from protlm.model.pretrained import PretrainedModel
from protlm.system.errors import UserError
from tests.small_models import small_model

pytestmark = pytest.mark.usefixtures("checked_shapes")
SEQUENCES = ["MKTAYIAKQR", "MKTAYIAKQRQISFVK", "MENDELMENDELMENDEL"]
WINDOW = 12


def alone(model: PretrainedModel, tokens: Sequence[int]) -> np.ndarray:
    """The log-probabilities of one row of tokens, LV."""
    tokens_1L = torch.tensor([list(tokens)])
    mask_1L = torch.ones_like(tokens_1L, dtype=torch.bool)
    with torch.inference_mode():
        logits_1LV = model.network(tokens_1L, mask_1L, causal=model.causal).logits_BLV
    return logits_1LV[0].double().log_softmax(-1).numpy()


def tokens_of(sequence: str) -> list[int]:
    return [VOCABULARY.cls, *(VOCABULARY[letter] for letter in sequence), VOCABULARY.eos]


@pytest.mark.parametrize("tokens_per_batch", [1, 40, 1000])
def test_batches_keep_the_order_and_the_budget(
    tokens_per_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model("softmax")
    sizes = []
    forward = model.network.forward

    def watched(tokens_BL: torch.Tensor, *rest: object, **named: object) -> object:
        sizes.append(tuple(tokens_BL.shape))
        return forward(tokens_BL, *rest, **named)

    monkeypatch.setattr(model.network, "forward", watched)
    queries = [Query(one, i, masked=i % 3 > 0) for one in SEQUENCES for i in range(len(one))]
    found = list(Predictor(model, tokens_per_batch).log_p(iter(queries)))
    assert [query for query, _ in found] == queries
    assert all(rows == 1 or rows * length <= tokens_per_batch for rows, length in sizes)
    assert (len(sizes) == 3) == (tokens_per_batch == 1000)
    monkeypatch.undo()
    for query, log_p_V in found:
        tokens = tokens_of(query.sequence)
        if query.masked:
            tokens[query.position + 1] = VOCABULARY.mask
        np.testing.assert_allclose(log_p_V, alone(model, tokens)[query.position + 1], atol=1e-9)


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
        expected_LV = alone(model, tokens[start : start + WINDOW])
        np.testing.assert_allclose(found[position], expected_LV[position + 1 - start], atol=1e-9)


def test_a_protein_that_fits_is_read_whole() -> None:
    model = small_model("softmax", max_length=WINDOW)
    sequence = SEQUENCES[0]
    assert len(sequence) + 2 == WINDOW
    log_p_LV = alone(model, tokens_of(sequence))
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
    expected = [alone(model, tokens_of(sequence))[1:-1] for sequence in sequences]
    sizes = []
    forward = model.network.forward

    def watched(tokens_BL: torch.Tensor, *rest: object, **named: object) -> object:
        sizes.append(tuple(tokens_BL.shape))
        return forward(tokens_BL, *rest, **named)

    monkeypatch.setattr(model.network, "forward", watched)
    asked = ((sequence, [5, 0, len(sequence) - 1]) for sequence in sequences)
    found = list(Predictor(model, tokens_per_batch).unmasked_log_p(asked))
    assert all(rows == 1 or rows * length <= tokens_per_batch for rows, length in sizes)
    assert sum(rows for rows, _ in sizes) == 4
    assert (len(sizes) == 3) == (tokens_per_batch >= 40)
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
        expected_LV = alone(model, tokens)
        expected = [expected_LV[i, token] for i, token in enumerate(tokens[1:])]
        np.testing.assert_allclose(log_p_L, expected, atol=1e-9)


def test_a_causal_model_reads_no_windows() -> None:
    predictor = Predictor(small_model("softmax", "causal", max_length=WINDOW))
    with pytest.raises(UserError, match="16 residues is longer than the 10"):
        list(predictor.causal_log_p(SEQUENCES[:2]))
