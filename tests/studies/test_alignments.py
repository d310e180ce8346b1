"""Contacts from alignments: planted couplings, and factored attention against its formula."""

import gzip
import itertools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from protlm.analysis.contact_regression import apc
from studies.alignments import (
    GAP,
    POTTS_STEPS,
    Alignment,
    FactoredAttention,
    Potts,
    aligned_columns,
    coupling_norms,
    factored_attention,
    inverse_covariance,
    potts,
    row_weights,
    train,
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


@pytest.fixture
def alignment() -> Alignment:
    """Nine rows of five columns, with gaps and a column that follows another."""
    generator = np.random.default_rng(0)
    columns_BL = generator.integers(4, size=(9, 5)).astype(np.uint8)
    columns_BL[:6, 3] = columns_BL[:6, 0]
    columns_BL[[0, 3, 3], [2, 0, 1]] = GAP
    return Alignment.of(columns_BL)


def test_the_inverse_covariance_is_its_formula() -> None:
    """Residue by residue in float64; n rows have the ridge 4.5 / sqrt(n)."""
    columns_BL = np.random.default_rng(0).integers(21, size=(50, 4))
    onehot_BC = np.array([[row[i] == v for i in range(4) for v in range(21)] for row in columns_BL])
    centered_BC = onehot_BC - onehot_BC.mean(axis=0)
    covariance = centered_BC.T @ centered_BC / 49 + 4.5 / math.sqrt(50) * np.eye(4 * 21)
    inverse = np.linalg.inv(covariance)
    norms_LL = np.zeros((4, 4))
    for i, j in itertools.permutations(range(4), 2):
        norms_LL[i, j] = 2 * np.linalg.norm(inverse[21 * i : 21 * i + 20, 21 * j : 21 * j + 20])
    np.testing.assert_allclose(inverse_covariance(columns_BL), apc(norms_LL), atol=1e-9)


def test_factored_attention_is_its_formula() -> None:
    """Pair by pair in float64, from the paper."""
    layer = FactoredAttention(4, torch.Generator().manual_seed(0))
    found_LLVV = layer.couplings().detach().numpy()
    q_HLK, k_HLK, v_HVV = (
        parameter.detach().double().numpy() for parameter in (layer.q_HLK, layer.k_HLK, layer.v_HVV)
    )
    expected_LLVV = np.zeros((4, 4, 20, 20))
    for i in range(4):
        for q_LK, k_LK, v_VV in zip(q_HLK, k_HLK, v_HVV, strict=True):
            others = [j for j in range(4) if j != i]
            logits = np.array([q_LK[i] @ k_LK[j] / np.sqrt(32) for j in others])
            shares = np.exp(logits) / np.exp(logits).sum()
            for share, j in zip(shares, others, strict=True):
                # W_ij has the residue of j first, and half of it is in W_ji, transposed.
                expected_LLVV[i, j] += share * v_VV / 2
                expected_LLVV[j, i] += share * v_VV.T / 2
    np.testing.assert_allclose(found_LLVV, expected_LLVV, rtol=1e-4, atol=1e-6)


def test_the_loss_is_its_formula(alignment: Alignment) -> None:
    """Column by column in float64; a gap neither says nor costs anything."""
    generator = torch.Generator().manual_seed(0)
    layer = FactoredAttention(5, generator)
    bias_LV = torch.randn(5, 20, generator=generator)
    rows = torch.tensor([0, 3, 3, 7])
    found = alignment.loss(rows, layer.couplings(), bias_LV).item()
    w_LLVV = layer.couplings().detach().double().numpy()
    nats = 0.0
    for tokens_L in alignment.tokens_BL[rows].tolist():
        for i in (i for i in range(5) if tokens_L[i] != GAP):
            logits_V = bias_LV[i].double().numpy()
            for j in (j for j in range(5) if j != i and tokens_L[j] != GAP):
                logits_V = logits_V + w_LLVV[i, j, tokens_L[j]]
            nats += np.log(np.exp(logits_V).sum()) - logits_V[tokens_L[i]]
    pairs = sum((w_LLVV[i, j] ** 2).sum() for i in range(5) for j in range(i))
    penalty = 0.2 * 4 / alignment.weights_B.sum().item() * pairs
    assert found == pytest.approx(nats / 4 + penalty, rel=1e-5)


def test_a_potts_model_reaches_its_optimum(alignment: Alignment) -> None:
    """On rows drawn anew its objective is near that of L-BFGS, which converges on these rows."""
    rows = torch.multinomial(
        alignment.weights_B, 4000, replacement=True, generator=torch.Generator().manual_seed(1)
    )

    def objective(layer: Potts) -> torch.Tensor:
        return alignment.loss(rows, layer.couplings(), layer.bias_LV)

    exact, start = Potts(5), Potts(5)
    for layer in (exact, start):
        layer.bias_LV.data.copy_(alignment.log_frequencies())
    optimizer = torch.optim.LBFGS(exact.parameters(), max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = objective(exact)
        loss.backward()
        return loss

    optimizer.step(closure)
    trained = Potts(5)
    train(trained, alignment, POTTS_STEPS)
    found, best, first = (objective(layer).item() for layer in (trained, exact, start))
    assert best <= found < best + 0.05 * (first - best)


def test_norms_do_not_depend_on_the_gauge() -> None:
    generator = np.random.default_rng(0)
    couplings_LLVV = generator.normal(size=(4, 4, 20, 20))
    shifted = couplings_LLVV + generator.normal(size=(4, 4, 20, 1))
    shifted += generator.normal(size=(4, 4, 1, 20))
    np.testing.assert_allclose(coupling_norms(shifted), coupling_norms(couplings_LLVV), atol=1e-9)


def test_alike_rows_share_a_weight() -> None:
    rows = [[0] * 10, [0] * 9 + [1], [2] * 10, [2] * 7 + [3] * 3, [2] * 6 + [GAP] * 4]
    onehot_BLV = functional.one_hot(torch.tensor(rows), 21)[:, :, :20].float()
    assert row_weights(onehot_BLV).tolist() == [0.5, 0.5, 1, 1, 1]
