"""The attention that each head pays to pairs of residues with a property (Vig et al. 2021).

The measure is p(f) = Σ f(i, j) a_ij / Σ a_ij over the pairs of residues of all proteins
(arXiv 2006.15222, section 3 and its appendix), with f(i, j) = f(j) for a property of the residue
that is attended to. With a threshold θ, a_ij is replaced by 1 if a_ij ≥ θ and 0 otherwise.
"""

from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from protlm.analysis.head_statistics import residue_rows
from protlm.model.pretrained import PretrainedModel
from protlm.system.errors import UserError

# Random sign changes of a test, and the smallest p-value that they can give.
FLIPS = 20_000
LOWEST_P = 1 / (FLIPS + 1)
_FLIPS_AT_ONCE = 100


def check_threshold(threshold: float) -> None:
    """Raises UserError if θ is not a possible weight."""
    if not 0 < threshold <= 1:
        raise UserError(f"threshold={threshold} must be above 0 and at most 1")


@final
class PropertySums(NamedTuple):
    """Sums over the pairs of one protein, float64, of the heads of all layers in order.

    Attributes:
        observed: Σ f a, [heads, properties].
        expected: the mean of Σ f a when weights are permuted among pairs with the same |i - j|.
        total: Σ a, [heads].
        observed_arcs: Σ f over the pairs with a ≥ θ, [heads, properties].
        total_arcs: the pairs with a ≥ θ, [heads].
    """

    observed: np.ndarray
    expected: np.ndarray
    total: np.ndarray
    observed_arcs: np.ndarray
    total_arcs: np.ndarray


def property_sums(
    model: PretrainedModel,
    sequence: str,
    properties: np.ndarray,
    known_LL: np.ndarray,
    *,
    threshold: float,
) -> PropertySums:
    """Returns the sums of the maps of a model on one protein; special tokens are left out.

    `properties` has f(i, j) of each property, [properties, L, L]; `known_LL` are the pairs that
    count, and the threshold is θ.
    """
    f = torch.from_numpy(properties & known_LL).double().flatten(1)
    known = torch.tensor(known_LL).double().flatten()
    layers = [
        _of_map(torch.cat(list(blocks), dim=1)[:, :, 1:-1].double().cpu(), f, known, threshold)
        for _, blocks in residue_rows(model, sequence)
    ]
    return PropertySums(*(torch.cat(parts).numpy() for parts in zip(*layers, strict=True)))


def _of_map(map_HLL: Tensor, f: Tensor, known: Tensor, threshold: float) -> tuple[Tensor, ...]:
    a = map_HLL.flatten(1) * known
    arcs = (map_HLL.flatten(1) >= threshold) * known
    observed, observed_arcs = a @ f.T, arcs @ f.T
    length = map_HLL.shape[1]
    positions_L = torch.arange(length)
    separation = (positions_L[:, None] - positions_L).abs().flatten()

    def by_separation(values: Tensor) -> Tensor:
        sums = values.new_zeros(len(values), length)
        return sums.index_add_(1, separation, values)

    pairs = by_separation(known[None])
    frequency = by_separation(f) / pairs.clamp(min=1)
    expected = by_separation(a) @ frequency.T
    return observed, expected, a.sum(dim=1), observed_arcs, arcs.sum(dim=1)


def pooled(sums: list[PropertySums]) -> PropertySums:
    """Returns the sums of all proteins."""
    return PropertySums(*(np.sum(parts, axis=0) for parts in zip(*sums, strict=True)))


def sign_flip_p_values(differences: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """Returns two-sided p-values for the heads of each property, [heads, properties].

    The differences d are of each protein, [proteins, heads, properties]. The hypothesis is that
    they are symmetric around 0. The signs of whole proteins are flipped at random, because the
    pairs of one protein are not independent. The statistic of a head is |t| = |Σ d| / √Σ d², which
    is compared with the largest of all heads after each of `FLIPS` flips (Westfall and Young 1993,
    max-T). A p-value is therefore already corrected for the number of heads. None is below
    `LOWEST_P`.
    """
    # Flips do not change Σ d². A head without differences has the statistic 0.
    scale = np.sqrt(np.square(differences).sum(axis=0))
    scaled = differences / np.where(scale > 0, scale, 1.0)
    observed = np.abs(scaled.sum(axis=0))
    flat = scaled.reshape(len(scaled), -1)
    generator = np.random.default_rng(seed)
    exceeded = np.zeros(observed.shape)
    for _ in range(0, FLIPS, _FLIPS_AT_ONCE):
        signs = generator.choice([-1.0, 1.0], size=(_FLIPS_AT_ONCE, len(flat)))
        largest = np.abs(signs @ flat).reshape(-1, *observed.shape).max(axis=1)
        # A sum with all signs unchanged must count in spite of its rounding.
        exceeded += (largest[:, None] >= observed * (1 - 1e-9)).sum(axis=0)
    return (exceeded + 1) / (FLIPS + 1)
