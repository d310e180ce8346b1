"""Random estimates of a softmax map beside the exact one, with bias and variance apart."""

from collections.abc import Sequence

import torch
from torch import Tensor

TOP_KEYS = 10
# Estimated weights below this count as this in a divergence, which is infinite otherwise.
_SMALLEST = 1e-30


def compare_estimates(
    exact_HLM: Tensor, estimates: Sequence[Tensor], v_HMC: Tensor
) -> dict[str, Tensor]:
    """Compares several draws of an estimated map with the exact map, per head, float64 H.

    With a row a of the exact map, â of an estimate, values V, and O = A V:

    * `kl`: KL(a ‖ â) in nats, `total_variation`: Σ |a - â| / 2, each the median over rows and
      draws; `total_variation_95`: its 95th percentile;
    * `top_overlap`: the fraction of the 10 largest weights of a row that are among the 10 largest
      of its estimate, mean over rows and draws;
    * `output_error`: ‖Ô - O‖ / ‖O‖, root mean square over draws;
    * `bias`, `deviation`: the error of the mean output and the deviation of the draws from it,
      output_error² = bias² + deviation². Their squares are unbiased for any number of draws, at
      least two; a negative bias² becomes 0.
    """
    number, a_HLM = len(estimates), exact_HLM.double()
    assert number >= 2, "one draw has no variance"
    outputs = torch.stack([x.double() @ v_HMC.double() for x in estimates])
    exact_HLC = a_HLM @ v_HMC.double()
    square_H = exact_HLC.square().sum(dim=(1, 2))
    mean_HLC = outputs.mean(dim=0)
    variance_H = (outputs - mean_HLC).square().sum(dim=(0, 2, 3)) / (number - 1) / square_H
    bias_H = (mean_HLC - exact_HLC).square().sum(dim=(1, 2)) / square_H - variance_H / number
    error_H = (outputs - exact_HLC).square().sum(dim=(0, 2, 3)) / number / square_H
    divergences = [_divergences(a_HLM, x.double()) for x in estimates]
    kl_HL, variation_HL, overlap_HL = (
        torch.cat(parts, dim=1) for parts in zip(*divergences, strict=True)
    )
    return {
        "kl": kl_HL.quantile(0.5, dim=1),
        "total_variation": variation_HL.quantile(0.5, dim=1),
        "total_variation_95": variation_HL.quantile(0.95, dim=1),
        "top_overlap": overlap_HL.mean(dim=1),
        "output_error": error_H.sqrt(),
        "bias": bias_H.clamp(min=0).sqrt(),
        "deviation": variance_H.sqrt(),
    }


def _divergences(a_HLM: Tensor, estimate_HLM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    positive_HLM = estimate_HLM.clamp(min=_SMALLEST)
    kl_HL = (torch.special.xlogy(a_HLM, a_HLM) - a_HLM * positive_HLM.log()).sum(dim=2)
    variation_HL = 0.5 * (a_HLM - estimate_HLM).abs().sum(dim=2)
    top = min(TOP_KEYS, a_HLM.shape[2])
    chosen = [
        torch.zeros_like(x, dtype=torch.bool).scatter(2, x.topk(top, dim=2).indices, True)
        for x in (a_HLM, estimate_HLM)
    ]
    overlap_HL = (chosen[0] & chosen[1]).sum(dim=2) / top
    return kl_HL, variation_HL, overlap_HL.double()
