"""The categorical Jacobian: a direct one in float64, blocks and symmetry."""

from pathlib import Path

import numpy as np
import pytest
import torch

from protlm.analysis.categorical_jacobian import jacobian_contacts
from protlm.data.vocabulary import STANDARD, VOCABULARY
from protlm.model.pretrained import PretrainedModel
from tests.marks import slow_but
from tests.small_models import evaluated, small_model, structure_folder

SEQUENCE = "MKTAYIAKQRWCF"
SMALL = ["softmax", "performer_relu", "performer_softmax"]
LETTERS = [VOCABULARY[letter] for letter in STANDARD]


def direct(judged: PretrainedModel, sequence: str) -> np.ndarray:
    """The definition, one change at a time, all of it in memory, in float64."""
    tokens = judged.tokenize([sequence]).tokens_BL
    length = len(sequence)
    shift = 0 if judged.causal else 1

    def logits(tokens_1L: torch.Tensor) -> np.ndarray:
        mask_1L = torch.ones_like(tokens_1L, dtype=torch.bool)
        with torch.inference_mode():
            out = judged.network(tokens_1L, mask_1L, causal=judged.causal).logits_BLV
        return out[0, shift : shift + length][:, LETTERS].numpy()

    plain = logits(tokens)
    jacobian = np.zeros((length, 20, length, 20))
    for i in range(length):
        for a, letter in enumerate(LETTERS):
            changed = tokens.clone()
            changed[0, i + 1] = letter
            jacobian[i, a] = logits(changed) - plain
    for axis in range(4):
        jacobian -= jacobian.mean(axis=axis, keepdims=True)
    jacobian = (jacobian + jacobian.transpose(2, 3, 0, 1)) / 2
    norms = np.sqrt((jacobian**2).sum(axis=(1, 3)))
    np.fill_diagonal(norms, 0)
    corrected = norms - norms.sum(0, keepdims=True) * norms.sum(1, keepdims=True) / norms.sum()
    np.fill_diagonal(corrected, 0)
    return corrected


@pytest.mark.parametrize("attention", slow_but(SMALL, "performer_relu"))
@pytest.mark.parametrize("objective", ["masked", "causal"])
def test_it_is_its_definition(attention: str, objective: str) -> None:
    judged = small_model(attention, objective)
    expected = direct(judged, SEQUENCE)
    found = jacobian_contacts(judged, SEQUENCE)
    # Logits are rounded to float32, and differences of them are small beside them.
    tolerance = 1e-4 * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, atol=tolerance, rtol=0)
    assert np.array_equal(found, found.T)


def test_bfloat16_products_change_little(model: PretrainedModel) -> None:
    """Of logits with 8 bits; where the Jacobian is small, rounding shows."""
    exact, rounded = (jacobian_contacts(model, 2 * SEQUENCE, bfloat16=x) for x in (False, True))
    pairs = np.triu_indices(len(exact), 1)
    assert 0.9 < np.corrcoef(exact[pairs], rounded[pairs])[0, 1] < 1 - 1e-9


@pytest.mark.slow
def test_the_evaluation_has_a_table(model: PretrainedModel, tmp_path: Path) -> None:
    folder = structure_folder(tmp_path, "test", 2)
    values, table = evaluated("jacobian", model, structures=folder, max_residues=103)
    assert values["num_test"] + len(values["left_out"]) == 2
    assert len(table.rows) == 3 * 3
    assert values["over_best_baseline"]["long"]["baseline"] in table.caption
    assert values["left_out"] and values["left_out"][0] in table.caption
