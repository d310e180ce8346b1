"""The attention of each head to pairs of residues with a property.

That is p(f) = Σ f(i, j) a_ij / Σ a_ij over the pairs of residues of all proteins (Vig et al. 2021,
arXiv 2006.15222, section 3), with f(i, j) = f(j) for a property of the residue that is attended to;
with a threshold θ, a_ij is replaced by 1 if a_ij ≥ θ and 0 otherwise.
"""

from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from protlm.analysis.head_statistics import residue_rows
from protlm.model.pretrained import PretrainedModel
from protlm.system.errors import UserError

# With fewer pairs above the threshold, a head does not count, as in the paper's code.
MIN_ARCS = 100


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
    inner = model.vocabulary.inner
    layers = [
        _of_map(torch.cat(list(blocks), dim=1)[:, :, inner].double().cpu(), f, known, threshold)
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


def summed(sums: list[PropertySums]) -> PropertySums:
    """Returns the sums of all proteins."""
    return PropertySums(*(np.sum(parts, axis=0) for parts in zip(*sums, strict=True)))
