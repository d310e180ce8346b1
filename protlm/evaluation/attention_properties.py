"""The attention that each head pays to pairs of residues with a property (Vig et al. 2021).

The measure is p(f) = Σ f(i, j) a_ij / Σ a_ij over the pairs of residues of all proteins
(arXiv 2006.15222, section 3 and its appendix), with f(i, j) = f(j) for a property of the residue
that is attended to. With a threshold θ, a_ij is replaced by 1 if a_ij ≥ θ and 0 otherwise.
"""

from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from protlm.evaluation.head_statistics import residue_blocks
from protlm.model.pretrained import PretrainedModel


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

    Args:
        model: the model.
        sequence: residues.
        properties: f(i, j) of each property, [properties, L, L].
        known_LL: the pairs that count.
        threshold: θ.
    """
    f = torch.from_numpy(properties & known_LL).double().flatten(1)
    known = torch.tensor(known_LL).double().flatten()
    layers = [
        _of_map(torch.cat(list(blocks), dim=1).double().cpu(), f, known, threshold)
        for _, blocks in residue_blocks(model, sequence)
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


def sign_flip_p_values(
    differences: np.ndarray, *, flips: int = 20_000, seed: int = 0
) -> np.ndarray:
    """Returns two-sided p-values of the hypothesis that differences are symmetric around 0.

    The signs of whole proteins are flipped at random, because the pairs of one protein are not
    independent. No p-value is below 1 / (flips + 1).

    Args:
        differences: the differences of each protein, [proteins, ...].
        flips: the number of random sign changes.
        seed: seed of the signs.
    """
    flat = differences.reshape(len(differences), -1)
    observed = np.abs(flat.sum(axis=0))
    generator = np.random.default_rng(seed)
    exceeded = np.zeros(flat.shape[1])
    for _ in range(0, flips, 1000):
        signs = generator.choice([-1.0, 1.0], size=(1000, len(flat)))
        # A sum with all signs unchanged must count in spite of its rounding.
        exceeded += (np.abs(signs @ flat) >= observed * (1 - 1e-9)).sum(axis=0)
    return ((exceeded + 1) / (flips + 1)).reshape(differences.shape[1:])
