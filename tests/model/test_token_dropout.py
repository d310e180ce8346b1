"""Token dropout: zeros at `<mask>`, and a scale that counts neither padding nor other rows."""

import pytest
import torch

from protlm.data.vocabulary import VOCABULARY
from protlm.model.layers import drop_masked_tokens

A, MASK, PAD = VOCABULARY["A"], VOCABULARY.mask, VOCABULARY.pad


def scales(rows: list[list[int]]) -> torch.Tensor:
    """What the embeddings of ones become."""
    tokens_BL = torch.tensor(rows)
    x_BLD = torch.ones(*tokens_BL.shape, 3, dtype=torch.float64)
    return drop_masked_tokens(x_BLD, tokens_BL, tokens_BL != PAD)[..., 0]


@pytest.mark.parametrize("num_masks", [0, 1, 3])
def test_the_scale_is_088_over_the_unmasked_fraction(num_masks: int) -> None:
    row = [0, *[MASK] * num_masks, *[A] * (8 - num_masks), 2]
    expected = torch.full((10,), 0.88 / (1 - num_masks / 10), dtype=torch.float64)
    expected[1 : 1 + num_masks] = 0
    torch.testing.assert_close(scales([row])[0], expected, rtol=1e-14, atol=0)


def test_padding_and_other_rows_do_not_count() -> None:
    row = [0, MASK, A, 2]
    alone = scales([row])[0]
    batch = scales([[*row, PAD, PAD], [0, A, A, A, A, 2]])
    assert torch.equal(batch[0, :4], alone)


def test_a_row_of_masks_is_finite() -> None:
    assert torch.equal(scales([[MASK, MASK]]), torch.zeros(1, 2, dtype=torch.float64))
