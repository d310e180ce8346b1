"""The maps and statistics of the heads of a model on one protein, layer by layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from protlm.analysis.contact_regression import MIN_SEPARATION, features
from protlm.analysis.head_statistics import head_statistics, sink_mass
from protlm.analysis.precision import SEPARATIONS, precision
from protlm.model.pretrained import PretrainedModel
from protlm.report.codes import Codes, binned
from protlm.report.plan import PagePlan
from protlm.report.protein import InspectedProtein
from protlm.system.terminal import JobProgress

_BLOCK_ENTRIES = 1 << 23
_LISTED_PAIRS = 20

# Name, label, unit and meaning of each column of the table of heads.
STATISTICS: tuple[tuple[str, str, str, str], ...] = (
    ("precision", "long P@L", "", "contacts among the L best pairs, 24 or more apart"),
    (
        "contrast",
        "pair contrast",
        "SD",
        "mean of the L largest APC-corrected pairs, 6 or more apart, in standard deviations",
    ),
    ("entropy", "entropy", "nats", "mean entropy of the rows; ln L if uniform"),
    ("effective_keys", "effective keys", "residues", "mean of exp(entropy) of the rows"),
    ("mean_distance", "distance", "residues", "mean distance |i - j| of the weight"),
    ("bandwidth", "bandwidth", "residues", "80 % of a row's weight lies within it (median)"),
    ("column_entropy", "column entropy", "nats", "entropy of the column means; low with stripes"),
    ("sink_mass", "sink mass", "", "mean weight of a row on <cls> and <eos>"),
    ("symmetry", "asymmetry", "", "0 if the map is symmetric, 1 if it is triangular"),
    ("neighbor_mass", "±1", "", "weight on the neighbors in the chain"),
    ("strand_mass", "±2", "", "weight two residues away, as along a strand"),
    ("helix_mass", "±3, ±4", "", "weight one helix turn away"),
)


@final
@dataclass(frozen=True, eq=False)
class HeadMap:
    """A map as it is shown.

    Attributes:
        codes: the weights.
        bin_size: residues in a row or column of the codes.
        error: the largest difference between a weight, or largest weight of a bin, and its code.
    """

    codes: Codes
    bin_size: int
    error: float

    @classmethod
    def of(cls, map_LL: np.ndarray, bin_size: int) -> "HeadMap":
        """Reduces and quantizes a map."""
        weights = binned(map_LL, bin_size)
        codes = Codes.of(weights)
        return cls(codes, bin_size, float(np.abs(codes.decode() - weights).max()))


@final
@dataclass(eq=False)
class InspectedHead:
    """A head: its statistics, and its map.

    Attributes:
        layer: from 1.
        head: from 1.
        statistics: values by the names of `STATISTICS`; NaN where undefined.
        pairs: the strongest residue pairs, 6 or more apart: row and column from 0, and weight.
        received: the mean weight of each column.
        reduced: the map, with `PagePlan.bin_size` residues a cell.
        full: the map with one residue a cell, if the page has it.
    """

    layer: int
    head: int
    statistics: dict[str, float]
    pairs: list[tuple[int, int, float]]
    received: Codes
    reduced: HeadMap
    full: HeadMap | None

    @property
    def rank(self) -> float:
        """How contact-like the head is: precision where a structure is known, else contrast."""
        best = self.statistics["precision"]
        best = self.statistics["contrast"] if np.isnan(best) else best
        return -np.inf if np.isnan(best) else best

    def to_plain(self) -> dict[str, Any]:
        """Returns values for JSON."""
        shown = self.full or self.reduced
        values = [self.statistics[name] for name, *_ in STATISTICS]
        return {
            "layer": self.layer,
            "head": self.head,
            "statistics": [None if np.isnan(value) else _short(value) for value in values],
            "pairs": [[row, column, _short(weight)] for row, column, weight in self.pairs],
            "received": self.received.to_plain(),
            "map": shown.codes.to_plain(),
            "bin": shown.bin_size,
            "error": _short(shown.error),
        }


def inspected_heads(
    model: PretrainedModel,
    protein: InspectedProtein,
    plan: PagePlan,
    *,
    layers: Sequence[int],
    heads: Sequence[int],
) -> list[InspectedHead]:
    """Returns the heads of the model, with full maps of the `plan.full_maps` most contact-like.

    Memory is that of the maps of one layer, and of the maps that are returned.
    """
    found: list[InspectedHead] = []
    with JobProgress("layers", len(layers)) as progress:
        for done, (layer, rows_HLM) in enumerate(_layers(model, protein, layers, heads), start=1):
            map_HLL = rows_HLM[:, :, 1:-1]
            statistics = head_statistics([map_HLL])
            statistics["sink_mass"] = sink_mass(rows_HLM).mean(dim=1)
            for place, head in enumerate(heads):
                own = {name: float(x_H[place]) for name, x_H in statistics.items() if x_H.ndim == 1}
                map_LL = map_HLL[place].cpu().numpy()
                found.append(_inspect(map_LL, (layer, head), own, protein, plan.bin_size))
            for worse in sorted(found, key=lambda head: -head.rank)[plan.full_maps :]:
                worse.full = None
            progress.update(done)
    return found


def _layers(
    model: PretrainedModel,
    protein: InspectedProtein,
    layers: Sequence[int],
    heads: Sequence[int],
) -> Iterator[tuple[int, Tensor]]:
    """Yields each layer and the rows of its maps at residues, float32 HLM, with special tokens."""
    length = len(protein) + 2
    block = max(1, min(256, _BLOCK_ENTRIES // (length * model.num_heads)))
    batch = model.tokenize([protein.sequence])
    rows = model.attention_row_blocks(batch, layers, heads, block=block)
    for layer, blocks in groupby(rows, key=lambda found: found[0]):
        map_HLL = torch.cat([map_BHML[0].float() for _, _, map_BHML in blocks], dim=1)
        yield layer, map_HLL[:, 1:-1]


def _inspect(
    map_LL: np.ndarray,
    number: tuple[int, int],
    statistics: dict[str, float],
    protein: InspectedProtein,
    bin_size: int,
) -> InspectedHead:
    return InspectedHead(
        *number,
        statistics | _contact_statistics(map_LL, protein),
        _strongest(map_LL),
        Codes.of(map_LL.mean(axis=0)),
        HeadMap.of(map_LL, bin_size),
        HeadMap.of(map_LL, 1),
    )


def _contact_statistics(map_LL: np.ndarray, protein: InspectedProtein) -> dict[str, float]:
    """Returns `contrast` and `precision` of the map, symmetrized and APC-corrected."""
    feature_LL = features(map_LL[None, None])[0]
    apart = feature_LL[np.triu_indices(len(map_LL), MIN_SEPARATION)].astype(np.float64)
    best = (
        np.partition(apart, -min(len(map_LL), len(apart)))[-len(map_LL) :] if len(apart) else apart
    )
    spread = float(apart.std()) if len(apart) else 0.0
    contrast = (float(best.mean()) - float(apart.mean())) / spread if spread else np.nan
    hits, asked = 0, 0
    if protein.contacts is not None:
        long = SEPARATIONS["long"]
        hits, asked = precision(feature_LL, protein.contacts, separation=long, divisor=1)
    return {"contrast": contrast, "precision": hits / asked if asked else np.nan}


def _strongest(map_LL: np.ndarray) -> list[tuple[int, int, float]]:
    """Returns the largest weights of pairs 6 or more apart, in decreasing order."""
    positions = np.arange(len(map_LL))
    rows, columns = np.nonzero(np.abs(positions[:, None] - positions) >= MIN_SEPARATION)
    weights = map_LL[rows, columns]
    if len(weights) > _LISTED_PAIRS:
        best = np.argpartition(-weights, _LISTED_PAIRS)[:_LISTED_PAIRS]
        rows, columns, weights = rows[best], columns[best], weights[best]
    pairs = zip(rows.tolist(), columns.tolist(), weights.tolist(), strict=True)
    return sorted(pairs, key=lambda pair: (-pair[2], pair[:2]))


def _short(value: float) -> float:
    """Rounds to six significant digits."""
    return float(f"{value:.6g}")
