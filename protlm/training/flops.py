"""Model FLOPs utilization: the FLOPs of a step relative to the peak of the device."""

import importlib.util
import math
import re
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from protlm.bounds import Bounds
from protlm.model.transformer import ProteinLM

# Dense bfloat16 TFLOP/s from the manufacturers' data sheets, by a part of torch's name of the
# device; the first match counts.
_PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.4,
    "H200 NVL": 835.0,
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "A100": 311.9,
    "A40": 149.7,
    "A30": 165.0,
    "A10G": 70.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "MI300X": 1307.4,
    "MI250X": 191.5,
}


def peak_tflops(device: torch.device) -> float | None:
    """Returns the dense bfloat16 TFLOP/s of a device, or None if it is not in the table.

    A device of AMD's MI250X is one of its two dies.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    # Whole words only: an RTX A4000 is not an A40.
    return next(
        (peak for part, peak in _PEAK_TFLOPS.items() if re.search(rf"\b{part}\b", name)), None
    )


class ModelFlops:
    """Floating-point operations of a network's training, by the length of a row.

    Counts the matrix products, scaled dot products and convolutions of the forward pass with
    torch's flop counter, at all positions of a row including padding. Training takes three times
    that number (arXiv 2204.02311, appendix B). Recomputed activations do not count.
    """

    def __init__(self, network: ProteinLM, *, causal: bool) -> None:
        self._network, self._causal = network, causal
        self._counted: dict[int, int] = {}

    def training(self, length: int, device: torch.device, bounds: Bounds | None = None) -> int:
        """Returns the FLOPs of training on a row of `length` tokens, forward and backward.

        The first call for a length runs one row through the network, on all ranks; with bounds, the
        rows of that batch, whose mean stands for those of all batches of packed proteins.
        """
        if length not in self._counted:
            rows = 1 if bounds is None else len(bounds.segment_L) // length
            tokens_BL = torch.zeros(rows, length, dtype=torch.int64, device=device)
            mask_BL = torch.ones_like(tokens_BL, dtype=torch.bool)
            counter = FlopCounterMode(display=False, custom_mapping=_more_counters(device))
            # Compiled kernels would not be counted.
            with torch.no_grad(), torch.compiler.set_stance("force_eager"), counter:
                self._network(tokens_BL, mask_BL, causal=self._causal, bounds=bounds, is_whole=True)
            self._counted[length] = 3 * counter.get_total_flops() // rows
        return self._counted[length]


def _more_counters(device: torch.device) -> dict[Any, Any]:
    """Returns counters that torch lacks: products by oneDNN, dot products on a CPU, and `bmm`.

    torch's own counter of `bmm` fails where the dtype of the result is given. On a GPU there are
    also those of the fused kernels.
    """

    def linear(x: Any, weight: Any, *_: Any, out_shape: Any) -> int:
        return 2 * math.prod(x) * weight[0]

    def products(x: Any, y: Any, *_: Any, out_shape: Any) -> int:
        return 2 * math.prod(x) * y[-1]

    def dot_products(
        query: Any,
        key: Any,
        value: Any,
        *_: Any,
        out_shape: Any,
        attn_mask: Any = None,
        scale: Any = None,
    ) -> int:
        return sdpa_flop_count(query, key, value)

    known: dict[Any, Any] = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: dot_products,
        torch.ops.aten.bmm: products,
    }
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        known[torch.ops.mkldnn._linear_pointwise] = linear
    return known | (fused_counters() if device.type == "cuda" else {})


def fused_counters() -> dict[Any, Any]:
    """Returns counters of the fused kernels of linear attention; imports Triton, if there is one.

    Counted are the projections of keys and queries, also where the identity takes the place of
    random features, the sums over keys, and the outputs with their denominators. What causal
    kernels compute of the map within a chunk is left out.
    """
    if importlib.util.find_spec("triton") is None:
        return {}
    from protlm.attention.linearized.fused.attention import attention

    def operations(q: Any, k: Any, v: Any, *others: Any, out_shape: Any) -> int:
        w = others[2]  # after the mask and the bounds of packed proteins
        sums = 2 * (math.prod(v) + math.prod(v[:-1]))
        return 2 * w[0] * (math.prod(q) + math.prod(k) + sums)

    operator: Any = attention
    return {operator._opoverload.overloadpacket: operations}
