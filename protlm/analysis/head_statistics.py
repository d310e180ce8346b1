"""Statistics of attention heads, from the maps of one layer at a time.

Entropy and distance follow Clark et al. 2019 (arXiv 1906.04341) and Vig and Belinkov 2019 (arXiv
1906.04284), with residues in the place of words.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from protlm.attention.ops.numerics import in_float64
from protlm.model.pretrained import PretrainedModel

# The offset profile reaches from -MAX_OFFSET to MAX_OFFSET residues.
MAX_OFFSET = 32
# The fraction of a row's mass within its bandwidth.
_BAND_MASS = 0.8
# Weights above this are rounding errors of 0.
NEGATIVE = -1e-6
_BLOCK_ENTRIES = 1 << 20


def head_statistics(map_HLL: Tensor) -> dict[str, Tensor]:
    """Returns statistics of each head of one layer, float64 H on the CPU, by name.

    With a_ij the weight of residue j in row i, and p_ij = a_ij / Σ_j a_ij:

    * `entropy`: the mean over rows of H_i = -Σ_j p_ij ln p_ij, in nats; ln L if uniform;
    * `effective_keys`: the mean over rows of exp(H_i), the effective number of keys;
    * `mean_distance`: the mean over rows of Σ_j p_ij |i - j|, in residues; (L² - 1) / (3 L) if
      uniform;
    * `bandwidth`: the smallest w with Σ p_ij ≥ 0.8 over |i - j| ≤ w, median over rows;
    * `column_entropy`: the entropy of the column means of p, in nats; small with vertical stripes;
    * `symmetry`: ‖A - Aᵀ‖ / ‖A + Aᵀ‖ in the Frobenius norm, 0 if symmetric, 1 if triangular
      without a diagonal;
    * `neighbor_mass`, `strand_mass`, `helix_mass`: the offset profile, summed over d = ±1, over
      ±2, and over ±3 and ±4;
    * `offset_profile`, HO: s(d), the mean of a_{i,i+d} over the rows i where residue i + d exists,
      d from -`MAX_OFFSET` to `MAX_OFFSET`; NaN where there is no such row.

    The first five are NaN for a head with negative weights, which is not a distribution. Rows of
    sum 0 do not count in them. The map has the rows and columns of residues only, and is not
    normalized again.
    """
    # One head at a time, because several float64 copies are needed.
    each = [_of_map(in_float64(map_LL)) for map_LL in map_HLL]
    return {name: torch.stack([one[name] for one in each]).cpu() for name in each[0]}


def _of_map(a_LL: Tensor) -> dict[str, Tensor]:
    profile_O = torch.stack(
        [a_LL.diagonal(offset).mean() for offset in range(-MAX_OFFSET, MAX_OFFSET + 1)]
    )

    def at(*distances: int) -> Tensor:
        places = [MAX_OFFSET + sign * d for d in distances for sign in (-1, 1)]
        return profile_O[places].nan_to_num(0.0).sum()

    return {
        **_of_distributions(a_LL),
        "symmetry": (a_LL - a_LL.T).norm() / (a_LL + a_LL.T).norm(),
        "neighbor_mass": at(1),
        "strand_mass": at(2),
        "helix_mass": at(3, 4),
        "offset_profile": profile_O,
    }


def _of_distributions(a_LL: Tensor) -> dict[str, Tensor]:
    weights_LL = a_LL.clamp(min=0)
    # NaN in rows of sum 0.
    p_LL = weights_LL / weights_LL.sum(dim=1, keepdim=True)
    entropy_L = torch.special.entr(p_LL).sum(dim=1)
    positions_L = torch.arange(len(a_LL), device=a_LL.device)
    distances_LL = (positions_L[:, None] - positions_L).abs()
    # Column d has the mass at distance d.
    within_LL = torch.zeros_like(p_LL).scatter_add_(1, distances_LL, p_LL)
    # Of maps in float32, a sum that is 0.8 in exact arithmetic may be smaller by its rounding.
    outside_LL = within_LL.cumsum(dim=1) < _BAND_MASS - 1e-6
    bandwidth_L = outside_LL.sum(dim=1).clamp(max=len(a_LL) - 1).double()
    found = {
        "entropy": entropy_L.nanmean(),
        "effective_keys": entropy_L.exp().nanmean(),
        "mean_distance": (within_LL @ positions_L.double()).nanmean(),
        "bandwidth": bandwidth_L.where(entropy_L.isfinite(), torch.nan).nanquantile(0.5),
        "column_entropy": torch.special.entr(p_LL.nanmean(dim=0)).sum(),
    }
    return {name: x.where(a_LL.amin() >= NEGATIVE, torch.nan) for name, x in found.items()}


def sink_mass(rows_HML: Tensor, model: PretrainedModel) -> Tensor:
    """Returns the weight on the tokens around the residues in each row, float64 HM."""
    start, length, around = model.vocabulary.start, rows_HML.shape[2], model.vocabulary.num_around
    columns = [*range(start), *range(length - around + start, length)]
    return in_float64(rows_HML[:, :, columns]).sum(dim=2)


def residue_rows(
    model: PretrainedModel,
    sequence: str,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Iterator[tuple[int, Iterator[Tensor]]]:
    """Yields the number of each layer, and the rows of its map at residues, in blocks.

    The columns `model.vocabulary.inner` are residues, the outer ones their frame. The blocks must
    be read before the next layer is requested. The default is all layers and all heads.
    """
    first, positions = model.vocabulary.start, len(sequence) + model.vocabulary.num_around
    last = first + len(sequence)
    block = max(1, min(256, _BLOCK_ENTRIES // (positions * model.num_heads)))
    found = model.attention_row_blocks(model.tokenize([sequence]), layers, heads, block=block)
    for layer, of_layer in groupby(found, key=lambda one: one[0]):
        blocks = (
            map_BHML[0, :, max(first - rows.start, 0) : max(last - rows.start, 0)]
            for _, rows, map_BHML in of_layer
        )
        yield layer, blocks


def layer_statistics(
    model: PretrainedModel,
    sequence: str,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Iterator[tuple[int, Tensor, dict[str, Tensor]]]:
    """Yields the number of each layer, its maps of residues, HLL, and their `head_statistics`.

    `sink_mass` is among these, as the mean over rows. The default is as for `residue_rows`.
    """
    for layer, blocks in residue_rows(model, sequence, layers, heads):
        rows_HLM = torch.cat([rows.float() for rows in blocks], dim=1)
        map_HLL = rows_HLM[:, :, model.vocabulary.inner]
        sink_H = sink_mass(rows_HLM, model).mean(dim=1).cpu()
        yield layer, map_HLL, {**head_statistics(map_HLL), "sink_mass": sink_H}
