"""The operands of linear attention, taken a block of rows at a time in full precision."""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protlm.attention.masking import zero_padding
from protlm.attention.performer.features import FeatureMap, FeatureMaps

# Features exist for this many positions at a time; a multiple of the causal chunk.
_BLOCK = 512


def row_blocks(length: int) -> list[slice]:
    """All positions in order, a block at a time."""
    return [slice(start, min(start + _BLOCK, length)) for start in range(0, length, _BLOCK)]


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Switches autocast off: features, normalisers and states need float32's precision."""
    return torch.autocast(x.device.type, enabled=False)


@dataclass(frozen=True)
class Operands:
    """Queries, keys and values with their mask and feature maps.

    What it returns is in float32 (float64 for float64 queries), and 0 at padded positions.
    """

    q_BHLK: Tensor
    k_BHLK: Tensor
    v_BHLC: Tensor
    mask_BL: Tensor
    projection_RK: Tensor | None
    maps: FeatureMaps

    @property
    def dtype(self) -> torch.dtype:
        """What everything is computed in."""
        return torch.promote_types(self.q_BHLK.dtype, torch.float32)

    def query_features(self, rows: slice) -> Tensor:
        """φ(q), BHMR for M rows: 0 at padding, so an output there has a denominator of 0."""
        return self._features(self.maps.queries, self.q_BHLK, rows)

    def key_features(self, rows: slice) -> Tensor:
        """φ(k), BHMR for M rows: 0 at padding, after any eps was added."""
        return self._features(self.maps.keys, self.k_BHLK, rows)

    def values(self, rows: slice) -> Tensor:
        """[v | 1]: with a column of ones the sum of the weights is one more output."""
        return F.pad(self._take(self.v_BHLC, rows), (0, 1), value=1.0)

    def query_gradient(self, dphi_BHMR: Tensor, phi_BHMR: Tensor, rows: slice) -> Tensor:
        """The gradient of q from that of φ(q)."""
        q_BHMK = self._take(self.q_BHLK, rows)
        return self.maps.queries.gradient(dphi_BHMR, phi_BHMR, q_BHMK, self._projection())

    def key_gradient(self, dphi_BHMR: Tensor, phi_BHMR: Tensor, rows: slice) -> Tensor:
        """The gradient of k from that of φ(k)."""
        k_BHMK = self._take(self.k_BHLK, rows)
        return self.maps.keys.gradient(dphi_BHMR, phi_BHMR, k_BHMK, self._projection())

    def _take(self, x_BHLK: Tensor, rows: slice) -> Tensor:
        return zero_padding(x_BHLK[:, :, rows].to(self.dtype), self.mask_BL[:, rows])

    def _features(self, feature_map: FeatureMap, x_BHLK: Tensor, rows: slice) -> Tensor:
        phi_BHMR = feature_map(self._take(x_BHLK, rows), self._projection())
        return zero_padding(phi_BHMR, self.mask_BL[:, rows])

    def _projection(self) -> Tensor | None:
        return None if self.projection_RK is None else self.projection_RK.to(self.dtype)


def normalize(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Splits [N | D], (B, H, L, C + 1), into N / D and 1 / D; 0 where no key has any weight."""
    inverse_BHL1 = inverse_of_weight(sums[..., -1:])
    return sums[..., :-1] * inverse_BHL1, inverse_BHL1


def inverse_of_weight(weight_BHL1: Tensor) -> Tensor:
    """1 / weight, and 0 for a row without weight: its output is then 0, not NaN."""
    # At the smallest normal number the inverse is finite, but its gradient summed over values and
    # positions would not be; 2²⁷ above, about 1e-30 in float32, leaves room for both.
    has_weight_BHL1 = weight_BHL1 > torch.finfo(weight_BHL1.dtype).tiny * 2**27
    return weight_BHL1.masked_fill(~has_weight_BHL1, torch.inf).reciprocal()


def sums_gradient(dout_BHLC: Tensor, out_BHLC: Tensor, inverse_BHL1: Tensor) -> Tensor:
    """The gradient of [N | D] from that of N / D: [dO / D | -(dO·O) / D]."""
    dtype = inverse_BHL1.dtype
    # A row without weight is a constant 0, whatever comes back for it, NaN included.
    dout_BHLC = dout_BHLC.to(dtype).masked_fill(inverse_BHL1 == 0, 0)
    dnumerator_BHLC = dout_BHLC * inverse_BHL1
    ddenominator_BHL1 = -(dnumerator_BHLC * out_BHLC.to(dtype)).sum(dim=-1, keepdim=True)
    return torch.cat([dnumerator_BHLC, ddenominator_BHL1], dim=-1)
