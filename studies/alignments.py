"""Contacts from the columns of one alignment, by methods that need no language model.

Inverse covariance is that of Zhang et al. 2024 (doi:10.1073/pnas.2406285121), of all rows with
equal weights. A Potts model has a coupling W_ij = W_ji^T of the residues in each pair of columns,
fitted to the pseudo-likelihood (Ekeberg et al. 2013, doi:10.1103/PhysRevE.87.012707) of distinct
rows, weighted, with gaps as missing data. Factored attention (Bhattacharya et al. 2020,
doi:10.1101/2020.12.21.423882) is one layer of attention whose queries and keys belong to the
columns and not to the residues in them: a Potts model with the symmetrized couplings
W_ij = sum over heads h of softmax_j(q_hi · k_hj / sqrt(K)) V_h. It is fitted here to the same
objective, the penalty of the couplings included, instead of the authors' penalty of its weights.
"""

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from protlm.analysis.contact_regression import apc

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
GAP = NUM_RESIDUES = len(LETTERS)
# Zhang et al. 2024: the covariance of n rows is regularized by this number / sqrt(n).
SHRINKAGE = 4.5
# Rows that are at least this identical share the weight of one.
ALIKE = 0.8
# The penalty of a pair of columns is this number times (L - 1), for L columns, and half of it for
# each of W_ij and W_ji (CCMpred, Seemayer et al. 2014, doi:10.1093/bioinformatics/btu500).
PENALTY = 0.2
# The authors' command has these heads, half of this rate, and 5,000 steps.
HEADS, HEAD_DIM, ROWS, LEARNING_RATE = 256, 32, 128, 1e-2
POTTS_STEPS, FACTORED_STEPS = 300, 1000


def aligned_columns(path: Path) -> np.ndarray:
    """Reads the match columns of an a3m file, uint8 BL; 20 is a gap or another letter."""
    rows: list[str] = []
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            if line.startswith(">"):
                rows.append("")
            else:
                rows[-1] += "".join(letter for letter in line.strip() if not letter.islower())
    number_of = {letter: number for number, letter in enumerate(LETTERS)}
    return np.array([[number_of.get(letter, GAP) for letter in row] for row in rows], np.uint8)


def inverse_covariance(columns_BL: np.ndarray) -> np.ndarray:
    """Returns the coupling of each pair of columns, float64 LL.

    The Frobenius norm over amino acids of the inverse of the regularized covariance of one-hot
    columns, with the gap as a state, corrected by the average product.
    """
    rows, length = columns_BL.shape
    states = NUM_RESIDUES + 1
    onehot = np.eye(states)[columns_BL].reshape(rows, -1)
    covariance = np.cov(onehot, rowvar=False)
    covariance += SHRINKAGE / np.sqrt(rows) * np.eye(len(covariance))
    blocks = np.linalg.inv(covariance).reshape(length, states, length, states)
    return _corrected_norms(blocks.transpose(0, 2, 1, 3)[:, :, :GAP, :GAP])


def potts(columns_BL: np.ndarray, *, steps: int = POTTS_STEPS) -> np.ndarray:
    """Fits a Potts model, and returns the coupling of each pair of columns, float64 LL."""
    return _trained_couplings(Potts(columns_BL.shape[1]), columns_BL, steps)


def factored_attention(columns_BL: np.ndarray, *, steps: int = FACTORED_STEPS) -> np.ndarray:
    """Fits factored attention, and returns the coupling of each pair of columns, float64 LL."""
    layer = FactoredAttention(columns_BL.shape[1], torch.Generator().manual_seed(0))
    return _trained_couplings(layer, columns_BL, steps)


def _trained_couplings(
    layer: "Potts | FactoredAttention", columns_BL: np.ndarray, steps: int
) -> np.ndarray:
    train(layer, Alignment.of(columns_BL), steps)
    with torch.no_grad():
        couplings_LLVV = layer.couplings()
    return coupling_norms(couplings_LLVV.double().numpy())


class Potts(nn.Module):
    """Couplings of all pairs of columns as parameters, initialized to zero."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.couplings_LLVV = nn.Parameter(torch.zeros(length, length, NUM_RESIDUES, NUM_RESIDUES))
        self.bias_LV = nn.Parameter(torch.zeros(length, NUM_RESIDUES))

    def couplings(self) -> Tensor:
        """Returns W, LLVV: a column, its context, the residue of the context and its own."""
        itself_LL = torch.eye(len(self.bias_LV), dtype=torch.bool)
        return symmetrized(self.couplings_LLVV.masked_fill(itself_LL[:, :, None, None], 0))


class FactoredAttention(nn.Module):
    """One layer of attention between the columns of an alignment.

    Args:
        length: the number of columns.
        generator: draws the first queries, keys and values.
    """

    def __init__(self, length: int, generator: torch.Generator) -> None:
        super().__init__()

        def drawn(*shape: int, scale: float) -> nn.Parameter:
            return nn.Parameter(scale * torch.randn(*shape, generator=generator))

        self.q_HLK = drawn(HEADS, length, HEAD_DIM, scale=0.5)
        self.k_HLK = drawn(HEADS, length, HEAD_DIM, scale=0.5)
        self.v_HVV = drawn(HEADS, NUM_RESIDUES, NUM_RESIDUES, scale=0.01)
        self.bias_LV = nn.Parameter(torch.zeros(length, NUM_RESIDUES))

    def couplings(self) -> Tensor:
        """Returns W, LLVV: a column, its context, the residue of the context and its own."""
        length = len(self.bias_LV)
        itself_LL = torch.eye(length, dtype=torch.bool)
        logits_HLL = self.q_HLK @ self.k_HLK.mT / HEAD_DIM**0.5
        map_HLL = logits_HLL.masked_fill(itself_LL, -torch.inf).softmax(dim=-1)
        flat = map_HLL.flatten(1).T @ self.v_HVV.flatten(1)
        return symmetrized(flat.view(length, length, NUM_RESIDUES, NUM_RESIDUES))


@dataclass(frozen=True)
class Alignment:
    """The distinct rows of an alignment that have residues.

    Attributes:
        tokens_BL: residues and gaps, int64.
        onehot_BLV: residues; a gap is zeros.
        weights_B: 1 / the number of rows that are 80 % identical to a row, itself included.
    """

    tokens_BL: Tensor
    onehot_BLV: Tensor
    weights_B: Tensor

    @classmethod
    def of(cls, columns_BL: np.ndarray) -> "Alignment":
        """Returns the alignment of columns."""
        distinct_BL = torch.from_numpy(np.unique(columns_BL, axis=0).astype(np.int64))
        tokens_BL = distinct_BL[(distinct_BL != GAP).any(dim=1)]
        onehot_BLV = functional.one_hot(tokens_BL, NUM_RESIDUES + 1)[:, :, :GAP].float()
        return cls(tokens_BL, onehot_BLV, row_weights(onehot_BLV))

    @property
    def penalty(self) -> float:
        """The factor of the sum of squared couplings in the loss of one row."""
        return PENALTY * (self.tokens_BL.shape[1] - 1) / 2 / float(self.weights_B.sum())

    def log_frequencies(self) -> Tensor:
        """Returns the logarithm of the frequencies of residues in each column, LV."""
        counts_LV = torch.einsum("b,blv->lv", self.weights_B, self.onehot_BLV)
        # As if one more row had each residue with weight 1/20.
        return (counts_LV + 1 / NUM_RESIDUES).log()

    def loss(self, rows: Tensor, couplings_LLVV: Tensor, bias_LV: Tensor) -> Tensor:
        """Returns the penalized pseudo-likelihood of rows in nats: a sum over columns, a mean."""
        logits_BLV = conditional_logits(self.onehot_BLV[rows], couplings_LLVV, bias_LV)
        nats = functional.cross_entropy(
            logits_BLV.mT, self.tokens_BL[rows], reduction="sum", ignore_index=GAP
        )
        return nats / len(rows) + self.penalty * couplings_LLVV.square().sum()


def train(layer: Potts | FactoredAttention, alignment: Alignment, steps: int) -> None:
    """Fits a model by Adam with a rate that falls to zero; rows are drawn by their weights."""
    layer.bias_LV.data.copy_(alignment.log_frequencies())
    optimizer = torch.optim.Adam(layer.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.multinomial(alignment.weights_B, ROWS, replacement=True, generator=generator)
        loss = alignment.loss(rows, layer.couplings(), layer.bias_LV)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def symmetrized(couplings_LLVV: Tensor) -> Tensor:
    """Returns the mean of W_ij and the transpose of W_ji."""
    return (couplings_LLVV + couplings_LLVV.permute(1, 0, 3, 2)) / 2


def coupling_norms(couplings_LLVV: np.ndarray) -> np.ndarray:
    """Returns norms of couplings whose rows and columns are made to sum to zero, corrected, LL.

    Models that differ by a constant of each row or column make the same predictions; in this gauge
    the norm is the smallest.
    """
    centered = couplings_LLVV - couplings_LLVV.mean(axis=2, keepdims=True)
    return _corrected_norms(centered - centered.mean(axis=3, keepdims=True))


def conditional_logits(onehot_BLV: Tensor, couplings_LLVV: Tensor, bias_LV: Tensor) -> Tensor:
    """Returns the logits of the residue in each column given all others, BLV; gaps are zeros."""
    context = couplings_LLVV.permute(1, 2, 0, 3).flatten(2).flatten(0, 1)
    return (onehot_BLV.flatten(1) @ context).view_as(onehot_BLV) + bias_LV


def row_weights(onehot_BLV: Tensor) -> Tensor:
    """Returns 1 / the number of rows that are 80 % identical to a row, itself included.

    Identity is the fraction of the residues of the longer of the two rows.
    """
    flat = onehot_BLV.flatten(1)
    lengths_B = flat.sum(dim=1)
    longer_BB = torch.maximum(lengths_B[:, None], lengths_B[None])
    is_alike_BB = flat @ flat.T >= ALIKE * longer_BB
    return 1 / is_alike_BB.sum(dim=1)


def _corrected_norms(blocks: np.ndarray) -> np.ndarray:
    """Returns symmetrized Frobenius norms over residues of LLVV, less the average product, LL."""
    norms_LL = np.sqrt((blocks**2).sum(axis=(2, 3)))
    norms_LL = norms_LL + norms_LL.T
    np.fill_diagonal(norms_LL, 0)
    return apc(norms_LL)
