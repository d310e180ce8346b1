"""Maps as bytes: 8 bits for the square root of each weight, in units of the largest one."""

import base64
from dataclasses import dataclass
from typing import Any, final

import numpy as np

_UNSIGNED, _SIGNED = 255, 127
_ZERO_OF_SIGNED = 128
# Weights above this, in units of the largest one, are rounding errors of 0.
_NEGATIVE = -1e-6


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
        is_signed = bool(unit.min(initial=0.0) < _NEGATIVE)
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
        text = base64.b64encode(self.codes.tobytes()).decode("ascii")
        return {"scale": self.scale, "signed": self.is_signed, "codes": text}


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
