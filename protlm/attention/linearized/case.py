"""A case of linear attention that fused kernels are compiled for, and how exact they must be."""

import json
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import assume_constant_result

from protlm.attention.linearized.features import FeatureMap
from protlm.attention.linearized.positive import ExponentialFeatureMap

# Maps queries, keys, values, the mask and bounds, if there are any, to outputs.
Attend = Callable[..., Tensor]
# The largest relative errors in the small case, of outputs and gradients.
TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 1e-4}


class Case(NamedTuple):
    """What fused kernels are compiled for; `num_rows` is None without a projection."""

    device: torch.device
    query_dtype: torch.dtype
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    key_width: int
    value_width: int
    num_rows: int | None
    is_exponential: bool
    causal: bool
    has_decay: bool = False
    is_packed: bool = False

    @classmethod
    def of(
        cls,
        q_BHLK: Tensor,
        k_BHLK: Tensor,
        v_BHLC: Tensor,
        feature_map: FeatureMap,
        *,
        causal: bool,
        has_decay: bool,
        is_packed: bool,
    ) -> "Case":
        dtypes = q_BHLK.dtype, k_BHLK.dtype, v_BHLC.dtype
        widths = q_BHLK.shape[-1], v_BHLC.shape[-1]
        rows_RK = feature_map.projection_RK
        num_rows = None if rows_RK is None else len(rows_RK)
        is_exponential = isinstance(feature_map, ExponentialFeatureMap)
        return cls(
            q_BHLK.device, *dtypes, *widths, num_rows, is_exponential, causal, has_decay, is_packed
        )

    @classmethod
    def read(cls, text: str) -> "Case":
        device, *rest = json.loads(text)
        dtypes = (getattr(torch, name.removeprefix("torch.")) for name in rest[:3])
        return cls(torch.device(device), *dtypes, *rest[3:])

    @property
    def text(self) -> str:
        """What `read` reads."""
        return json.dumps([x if isinstance(x, int | None) else str(x) for x in self])

    @property
    def label(self) -> str:
        """The case on any device, for people."""
        features = "no projection" if self.num_rows is None else f"{self.num_rows} rows"
        packed = "packed " if self.is_packed else ""
        return (
            f"{packed}{'causal' if self.causal else 'bidirectional'} "
            f"{'softmax' if self.is_exponential else 'ReLU'}, {features}, heads of "
            f"{self.key_width} and {self.value_width}, {'/'.join(map(str, self[1:4]))}"
        )


@assume_constant_result
def is_hopper(device: torch.device) -> bool:
    """Returns whether a device is a card of compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
