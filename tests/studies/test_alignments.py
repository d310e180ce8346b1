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


def test_inverse_covariance_is_that_of_its_authors() -> None:
    """Entry by entry: the covariance of one-hot columns, 4.5 / sqrt(n) on its diagonal."""
    columns_BL = np.random.default_rng(0).integers(3, size=(25, 4))
    number, length, states = 25, 4, 21
    onehot = np.zeros((number, length * states))
    for row, residues in enumerate(columns_BL):
        for column, residue in enumerate(residues):
            onehot[row, column * states + residue] = 1
    centered = onehot - onehot.mean(axis=0)
    covariance = centered.T @ centered / (number - 1) + 4.5 / 5 * np.eye(length * states)
    inverse = np.linalg.inv(covariance)
    norms = np.zeros((length, length))
    for i in range(length):
        for j in range(length):
            if i != j:
                block = inverse[i * states : i * states + 20, j * states : j * states + 20]
                norms[i, j] = np.sqrt((block**2).sum())
    norms += norms.T
    off = ~np.eye(length, dtype=bool)
    expected = norms - np.outer(norms.sum(axis=0), norms.sum(axis=1)) / norms.sum()
    np.testing.assert_allclose(inverse_covariance(columns_BL)[off], expected[off], rtol=1e-9)


@pytest.fixture
def alignment() -> Alignment:
    """Nine rows of five columns, with gaps and a column that follows another."""
    generator = np.random.default_rng(0)
    columns_BL = generator.integers(4, size=(9, 5)).astype(np.uint8)
    columns_BL[:6, 3] = columns_BL[:6, 0]
    columns_BL[[0, 3, 3], [2, 0, 1]] = GAP
    return Alignment.of(columns_BL)


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
