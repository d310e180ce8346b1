"""Contacts from alignments: planted couplings, and factored attention against its formula."""

import gzip
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from studies.alignments import (
    GAP,
    FactoredAttention,
    aligned_columns,
    conditional_logits,
    factored_attention,
    inverse_covariance,
    potts,
    row_weights,
)


def test_insertions_are_left_out_and_unknown_residues_are_gaps(tmp_path: Path) -> None:
    path = tmp_path / "a.a3m.gz"
    with gzip.open(path, "wt") as file:
        file.write(">query\nACX\n>one\nAkl-\nY\n")
    assert aligned_columns(path).tolist() == [[0, 1, 20], [0, 20, 19]]


@pytest.mark.parametrize(
    "couplings", [inverse_covariance, potts, partial(factored_attention, steps=150)]
)
def test_an_indirect_coupling_is_weaker_than_the_direct_ones(
    couplings: Callable[[np.ndarray], np.ndarray],
) -> None:
    """Columns 1, 4 and 7 are a chain: 1 and 7 correlate only through 4."""
    generator = np.random.default_rng(0)
    columns_BL = generator.integers(4, size=(3000, 9))
    for target, source in ((4, 1), (7, 4)):
        copied = generator.random(len(columns_BL)) < 0.8
        columns_BL[copied, target] = columns_BL[copied, source]
    scores_LL = couplings(columns_BL)
    correlation = np.mean(columns_BL[:, 1] == columns_BL[:, 7])
    assert correlation > 0.6
    assert min(scores_LL[1, 4], scores_LL[4, 7]) > 3 * scores_LL[1, 7]
    rest = np.triu(np.ones((9, 9), dtype=bool), 1)
    rest[[1, 4], [4, 7]] = False
    assert min(scores_LL[1, 4], scores_LL[4, 7]) > 3 * scores_LL[rest].max()


def test_factored_attention_is_its_formula() -> None:
    """Column by column in float64, from the paper; a gap says nothing."""
    generator = torch.Generator().manual_seed(0)
    tokens_BL = torch.randint(21, (6, 5), generator=generator)
    tokens_BL[0, 2] = GAP
    layer = FactoredAttention(5, generator)
    onehot_BLV = functional.one_hot(tokens_BL, 21)[:, :, :20].float()
    found_BLV = conditional_logits(onehot_BLV, layer.couplings(), layer.bias_LV).detach().numpy()
    q_HLK, k_HLK, v_HVV = (
        parameter.detach().double().numpy() for parameter in (layer.q_HLK, layer.k_HLK, layer.v_HVV)
    )
    for row, tokens_L in enumerate(tokens_BL.tolist()):
        for i in range(5):
            expected_V = np.zeros(20)
            for q_LK, k_LK, v_VV in zip(q_HLK, k_HLK, v_HVV, strict=True):
                others = [j for j in range(5) if j != i]
                logits = np.array([q_LK[i] @ k_LK[j] / np.sqrt(32) for j in others])
                shares = np.exp(logits) / np.exp(logits).sum()
                for share, j in zip(shares, others, strict=True):
                    if tokens_L[j] != GAP:
                        expected_V += share * v_VV[tokens_L[j]]
            np.testing.assert_allclose(found_BLV[row, i], expected_V, rtol=1e-4, atol=1e-5)


def test_alike_rows_share_a_weight() -> None:
    rows = [[0] * 10, [0] * 9 + [1], [2] * 10, [2] * 7 + [3] * 3, [2] * 6 + [GAP] * 4]
    onehot_BLV = functional.one_hot(torch.tensor(rows), 21)[:, :, :20].float()
    assert row_weights(onehot_BLV).tolist() == [0.5, 0.5, 1, 1, 1]
