"""The maps and statistics of the heads of a model on one protein, layer by layer.

Maps are bytes on the page: the square root of each weight, in units of the largest one.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from protlm.analysis.contact_regression import features
from protlm.analysis.head_statistics import NEGATIVE, layer_statistics
from protlm.analysis.precision import MIN_SEPARATION, SEPARATIONS, precision_at
from protlm.model.pretrained import PretrainedModel
from protlm.report.page import check_size
from protlm.report.protein import InspectedProtein
from protlm.system.terminal import watched

_UNSIGNED, _SIGNED = 255, 127
_ZERO_OF_SIGNED = 128


@final
@dataclass(frozen=True, eq=False)
class Codes:
    """Quantized weights, uint8 in the shape of the weights.

    A weight is scale · (c / 255)², or, signed, with n = c - 128, sign(n) · scale · (n / 127)²; the
    scale is the largest absolute weight.
    """

    scale: float
    is_signed: bool
    codes: np.ndarray

    @classmethod
    def of(cls, weights: np.ndarray) -> "Codes":
        """Quantizes weights, which must be finite."""
        values = weights.astype(np.float64)
        scale = float(np.abs(values).max(initial=0.0))
        unit = values / (scale or 1.0)
        is_signed = bool(unit.min(initial=0.0) < NEGATIVE)
        if is_signed:
            codes = _ZERO_OF_SIGNED + np.sign(unit) * np.sqrt(np.abs(unit)) * _SIGNED
        else:
            codes = np.sqrt(np.maximum(unit, 0.0)) * _UNSIGNED
        return cls(scale, is_signed, np.rint(codes).astype(np.uint8))

    def decode(self) -> np.ndarray:
        """Returns the weights that the page shows, float64."""
        if self.is_signed:
            steps = self.codes.astype(np.float64) - _ZERO_OF_SIGNED
            return np.sign(steps) * self.scale * (steps / _SIGNED) ** 2
        return self.scale * (self.codes / _UNSIGNED) ** 2

    @property
    def num_bytes(self) -> int:
        """The length of the codes in base64."""
        return -(-self.codes.size // 3) * 4

    def to_plain(self) -> dict[str, Any]:
        """Returns values for JSON; the codes are base64, row by row."""
        return {
            "scale": self.scale,
            "signed": self.is_signed,
            "codes": base64.b64encode(self.codes.tobytes()).decode("ascii"),
        }


def binned(map_LL: np.ndarray, size: int) -> np.ndarray:
    """Returns the weight of largest magnitude in each square of `size` × `size` residue pairs.

    The squares at the end of the protein may be smaller.

    >>> binned(np.array([[1.0, 2.0, 0.0], [0.0, -3.0, 0.0], [0.5, 0.0, 4.0]]), 2).tolist()
    [[-3.0, 0.0], [0.5, 4.0]]
    """
    if size == 1:
        return map_LL
    starts = np.arange(0, len(map_LL), size)

    def pooled(which: np.ufunc) -> np.ndarray:
        return which.reduceat(which.reduceat(map_LL, starts, axis=0), starts, axis=1)

    highest, lowest = pooled(np.maximum), pooled(np.minimum)
    return np.where(highest >= -lowest, highest, lowest)


_LISTED_PAIRS = 20
# Residue pairs of all full maps that the user has not selected, which have 11 MB.
_FULL_PAIRS = 8_250_000
_OVERVIEW_SIDE = 96

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
    """A map as it is shown, with `bin_size` residues in a row or column of the codes.

    The error is the largest difference between a weight, or largest weight of a bin, and its code.
    """

    codes: Codes
    bin_size: int
    error: float

    @classmethod
    def of(cls, map_LL: np.ndarray, bin_size: int) -> "HeadMap":
        weights = binned(map_LL, bin_size)
        codes = Codes.of(weights)
        return cls(codes, bin_size, float(np.abs(codes.decode() - weights).max()))


@final
@dataclass(eq=False)
class InspectedHead:
    """A head: its layer and number, from 1, its statistics by `STATISTICS`, and its map.

    `pairs` are the strongest residue pairs, 6 or more apart: row and column from 0, and weight;
    `received` is the mean weight of each column. The full map has one residue a cell, the reduced
    one at most 96 × 96 cells.
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

    @property
    def shown(self) -> HeadMap:
        return self.full or self.reduced

    def to_plain(self) -> dict[str, Any]:
        values = [self.statistics[name] for name, *_ in STATISTICS]
        return {
            "layer": self.layer,
            "head": self.head,
            "statistics": [None if np.isnan(value) else _short(value) for value in values],
            "pairs": [[row, column, _short(weight)] for row, column, weight in self.pairs],
            "received": self.received.to_plain(),
            "map": self.shown.codes.to_plain(),
            "bin": self.shown.bin_size,
            "error": _short(self.shown.error),
        }


def inspected_heads(
    model: PretrainedModel,
    protein: InspectedProtein,
    *,
    layers: Sequence[int],
    heads: Sequence[int],
    keep_full: bool = False,
    num_models: int = 1,
) -> list[InspectedHead]:
    """Returns the heads of the model.

    With `keep_full` all maps are full, or else those of the most contact-like heads, as many as fit
    into 11 MB, which `num_models` share, and at least one. Memory is that of the maps of one layer,
    and of the maps that are returned.
    """
    found: list[InspectedHead] = []
    bin_size = -(-len(protein) // _OVERVIEW_SIDE)
    most = max(_FULL_PAIRS // num_models // len(protein) ** 2, 1)
    kept = len(layers) * len(heads) if keep_full else most
    of_layers = layer_statistics(model, protein.sequence, layers, heads)
    for layer, map_HLL, statistics in watched("layers", of_layers, total=len(layers)):
        for place, head in enumerate(heads):
            own = {name: float(x_H[place]) for name, x_H in statistics.items() if x_H.ndim == 1}
            map_LL = map_HLL[place].cpu().numpy()
            found.append(
                InspectedHead(
                    layer,
                    head,
                    own | _contact_statistics(map_LL, protein),
                    _strongest(map_LL),
                    Codes.of(map_LL.mean(axis=0)),
                    HeadMap.of(map_LL, bin_size),
                    HeadMap.of(map_LL, 1),
                )
            )
        for worse in sorted(found, key=lambda head: -head.rank)[kept:]:
            worse.full = None
        check_size(sum(one.shown.codes.num_bytes + one.received.num_bytes for one in found))
    return found


def _contact_statistics(map_LL: np.ndarray, protein: InspectedProtein) -> dict[str, float]:
    """Returns `contrast` and `precision` of the map, symmetrized and APC-corrected."""
    feature_LL = features(map_LL[None, None])[0]
    apart = feature_LL[np.triu_indices(len(map_LL), MIN_SEPARATION)].astype(np.float64)
    spread, contrast = float(apart.std()) if len(apart) else 0.0, np.nan
    if spread:
        best = np.partition(apart, -min(len(map_LL), len(apart)))[-len(map_LL) :]
        contrast = (float(best.mean()) - float(apart.mean())) / spread
    known_LL = protein.contacts
    best = np.nan if known_LL is None else precision_at(feature_LL, known_LL, SEPARATIONS["long"])
    return {"contrast": contrast, "precision": best}


def _strongest(map_LL: np.ndarray) -> list[tuple[int, int, float]]:
    positions = np.arange(len(map_LL))
    rows, columns = np.nonzero(np.abs(positions[:, None] - positions) >= MIN_SEPARATION)
    weights = map_LL[rows, columns]
    if len(weights) > _LISTED_PAIRS:
        best = np.argpartition(-weights, _LISTED_PAIRS)[:_LISTED_PAIRS]
        rows, columns, weights = rows[best], columns[best], weights[best]
    pairs = zip(rows.tolist(), columns.tolist(), weights.tolist(), strict=True)
    return sorted(pairs, key=lambda pair: (-pair[2], pair[:2]))


def _short(value: float) -> float:
    return float(f"{value:.6g}")
