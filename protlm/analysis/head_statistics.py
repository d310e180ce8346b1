"""Statistics of attention heads, from maps in blocks of rows, at memory linear in the length.

Entropy and distance follow Clark et al. 2019 (arXiv 1906.04341) and Vig and Belinkov 2019 (arXiv
1906.04284), with residues in the place of words.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import final

import torch
from torch import Tensor

from protlm.model.pretrained import PretrainedModel

# The offset profile reaches from -MAX_OFFSET to MAX_OFFSET residues.
MAX_OFFSET = 32
# Symmetry needs the whole maps of a layer, 4 H L² bytes; it is left out of longer proteins.
MAX_SYMMETRY_RESIDUES = 2_048
# The fraction of a row's mass within its bandwidth.
_BAND_MASS = 0.8
# Weights above this are rounding errors of 0.
NEGATIVE = -1e-6
_BLOCK_ENTRIES = 1 << 20


def head_statistics(blocks: Iterable[Tensor]) -> dict[str, Tensor]:
    """Returns statistics of each head of one layer, float64 H on the CPU, by name.

    With a_ij the weight of residue j in row i, and p_ij = a_ij / Σ_j a_ij:

    * `entropy`: the mean over rows of H_i = -Σ_j p_ij ln p_ij, in nats; ln L if uniform;
    * `effective_keys`: the mean over rows of exp(H_i), the effective number of keys;
    * `mean_distance`: the mean over rows of Σ_j p_ij |i - j|, in residues; (L² - 1) / (3 L) if
      uniform;
    * `bandwidth`: the smallest w with Σ p_ij ≥ 0.8 over |i - j| ≤ w, median over rows;
    * `column_entropy`: the entropy of the column means of p, in nats; small with vertical stripes;
    * `symmetry`: ‖A - Aᵀ‖ / ‖A + Aᵀ‖ in the Frobenius norm, 0 if symmetric, 1 if triangular
      without a diagonal; NaN for more than `MAX_SYMMETRY_RESIDUES` residues;
    * `neighbor_mass`, `strand_mass`, `helix_mass`: the offset profile, summed over d = ±1, over
      ±2, and over ±3 and ±4;
    * `offset_profile`, HO: s(d), the mean of a_{i,i+d} over the rows i where residue i + d exists,
      d from -`MAX_OFFSET` to `MAX_OFFSET`; NaN where there is no such row.

    The first five are NaN for a head with negative weights, which is not a distribution. Rows of
    sum 0 do not count in them. The blocks, HML, are consecutive rows of a map, from the first to
    the last, with the rows and columns of residues only and not normalized again.
    """
    sums = HeadSums()
    for block_HML in blocks:
        sums.add(block_HML)
    return sums.statistics()


def sink_mass(rows_HML: Tensor, model: PretrainedModel) -> Tensor:
    """Returns the weight on the tokens around the residues in each row, float64 HM."""
    start, length, around = model.vocabulary.start, rows_HML.shape[2], model.vocabulary.num_around
    columns = [*range(start), *range(length - around + start, length)]
    return rows_HML[:, :, columns].double().sum(dim=2)


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


@final
class HeadSums:
    """Sums over the rows of a map of residues that have been added, from the first to the last."""

    def __init__(self) -> None:
        self.rows = 0

    def _begin(self, block_HML: Tensor) -> None:
        heads, _, self.length = block_HML.shape
        zeros = torch.zeros(heads, self.length, dtype=torch.float64, device=block_HML.device)
        self.lowest_H = zeros[:, 0].clone()
        self.counted_H = zeros[:, 0].clone()
        self.entropy_H, self.keys_H = zeros[:, 0].clone(), zeros[:, 0].clone()
        self.distance_H = zeros[:, 0].clone()
        self.columns_HL, self.bandwidths_HL = zeros.clone(), zeros.clone()
        self.offsets_HO = zeros.new_zeros(heads, 2 * MAX_OFFSET + 1)
        is_short = self.length <= MAX_SYMMETRY_RESIDUES
        self.map_HLL = block_HML.new_empty(heads, self.length, self.length) if is_short else None

    def add(self, block_HML: Tensor) -> None:
        if not self.rows:
            self._begin(block_HML)
        assert block_HML.shape[2] == self.length, "blocks of different maps"
        a_HML = block_HML.double()
        rows_M = torch.arange(self.rows, self.rows + a_HML.shape[1], device=a_HML.device)
        if self.map_HLL is not None:
            self.map_HLL[:, self.rows : self.rows + len(rows_M)] = block_HML
        self.rows += len(rows_M)
        if not len(rows_M):
            return
        self.lowest_H = torch.minimum(self.lowest_H, a_HML.amin(dim=(1, 2)))
        self._add_offsets(a_HML, rows_M)
        self._add_distributions(a_HML.clamp(min=0), rows_M)

    def _add_offsets(self, a_HML: Tensor, rows_M: Tensor) -> None:
        offsets_O = torch.arange(-MAX_OFFSET, MAX_OFFSET + 1, device=a_HML.device)
        columns_MO = rows_M[:, None] + offsets_O
        exists_MO = (columns_MO >= 0) & (columns_MO < self.length)
        places_HMO = columns_MO.clamp(0, self.length - 1).expand(len(a_HML), -1, -1)
        self.offsets_HO += (a_HML.gather(2, places_HMO) * exists_MO).sum(dim=1)

    def _add_distributions(self, a_HML: Tensor, rows_M: Tensor) -> None:
        mass_HM1 = a_HML.sum(dim=2, keepdim=True)
        counts_HM = (mass_HM1 > 0).squeeze(2).double()
        p_HML = a_HML / mass_HM1.where(mass_HM1 > 0, 1.0)
        entropy_HM = torch.special.entr(p_HML).sum(dim=2)
        self.counted_H += counts_HM.sum(dim=1)
        self.entropy_H += (counts_HM * entropy_HM).sum(dim=1)
        self.keys_H += (counts_HM * entropy_HM.exp()).sum(dim=1)
        self.columns_HL += p_HML.sum(dim=1)
        positions_L = torch.arange(self.length, device=a_HML.device)
        distances_HML = (rows_M[:, None] - positions_L).abs().expand_as(p_HML)
        # Column d now has the mass at distance d.
        p_HML = torch.zeros_like(p_HML).scatter_add_(2, distances_HML, p_HML)
        self.distance_H += (p_HML @ positions_L.double()).sum(dim=1)
        # Of maps in float32, a sum that is 0.8 in exact arithmetic may be smaller by its rounding.
        outside_HML = p_HML.cumsum(dim=2) < _BAND_MASS - 1e-6
        bandwidth_HM = outside_HML.sum(dim=2).clamp(max=self.length - 1)
        self.bandwidths_HL.scatter_add_(1, bandwidth_HM, counts_HM)

    def statistics(self) -> dict[str, Tensor]:
        assert self.rows and self.rows == self.length, "the blocks are not rows of a square map"
        offsets_O = torch.arange(-MAX_OFFSET, MAX_OFFSET + 1, device=self.offsets_HO.device)
        profile_HO = self.offsets_HO / (self.length - offsets_O.abs()).clamp(min=0)

        def at(*distances: int) -> Tensor:
            places = [MAX_OFFSET + sign * d for d in distances for sign in (-1, 1)]
            return profile_HO[:, places].nan_to_num(0.0).sum(dim=1)

        found = {
            **self._of_distributions(),
            "symmetry": self._symmetry(),
            "neighbor_mass": at(1),
            "strand_mass": at(2),
            "helix_mass": at(3, 4),
            "offset_profile": profile_HO,
        }
        return {name: value.cpu() for name, value in found.items()}

    def _of_distributions(self) -> dict[str, Tensor]:
        counted_H1 = self.counted_H[:, None]
        found = {
            "entropy": self.entropy_H / self.counted_H,
            "effective_keys": self.keys_H / self.counted_H,
            "mean_distance": self.distance_H / self.counted_H,
            "bandwidth": _histogram_median(self.bandwidths_HL),
            "column_entropy": torch.special.entr(self.columns_HL / counted_H1).sum(dim=1),
        }
        is_distribution_H = (self.lowest_H >= NEGATIVE) & (self.counted_H > 0)
        return {name: x_H.where(is_distribution_H, torch.nan) for name, x_H in found.items()}

    def _symmetry(self) -> Tensor:
        if self.map_HLL is None:
            return torch.full_like(self.counted_H, torch.nan)
        difference_H, sum_H = torch.zeros_like(self.counted_H), torch.zeros_like(self.counted_H)
        for start in range(0, self.length, 256):
            rows = slice(start, start + 256)
            a_HML = self.map_HLL[:, rows].double()
            transposed_HML = self.map_HLL[:, :, rows].mT.double()
            difference_H += (a_HML - transposed_HML).square().sum(dim=(1, 2))
            sum_H += (a_HML + transposed_HML).square().sum(dim=(1, 2))
        return (difference_H / sum_H).sqrt()


def _histogram_median(counts_HL: Tensor) -> Tensor:
    """Returns the median of the numbers 0 to L - 1 that occur `counts_HL` times, H."""
    cumulative_HL, totals_H1 = counts_HL.cumsum(dim=1), counts_HL.sum(dim=1, keepdim=True)
    lower_H = (cumulative_HL < torch.ceil(totals_H1 / 2)).sum(dim=1)
    upper_H = (cumulative_HL < torch.floor(totals_H1 / 2) + 1).sum(dim=1)
    return (lower_H + upper_H) / 2
