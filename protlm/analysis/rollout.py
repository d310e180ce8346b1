"""Attention rollout for one target position, without an L×L map.

Abnar and Zuidema 2020 (arXiv 2005.00928, section 3): with A the mean map of the heads of a layer,
Ã = (A + I) / 2, its rows normalized, and the rollout is the product Ã_N ... Ã_1.
"""

import torch
from torch import Tensor

from protlm.model.pretrained import PretrainedModel
from protlm.system.errors import UserError


def rollout(model: PretrainedModel, sequence: str, position: int) -> Tensor:
    """Returns the rollout of one position to each input token, float64 L, with special tokens.

    Position 0 is `<cls>`, n the nth residue, and the last is `<eos>`. Its row is propagated from
    the last layer to the first, whose maps are read in blocks of rows; this takes a pass through
    the network for each layer. Residual connections count as one half; values and feed-forward
    layers are ignored.
    """
    batch = model.tokenize([sequence])
    row_L = torch.zeros(batch.tokens_BL.shape[1], dtype=torch.float64, device=model.device)
    row_L[position] = 1.0
    for layer in range(model.num_layers, 0, -1):
        before_L = torch.zeros_like(row_L)
        for _, rows, map_BHML in model.attention_row_blocks(batch, [layer]):
            mean_ML = map_BHML[0].double().mean(dim=0)
            weights_M = row_L[rows] / (mean_ML.sum(dim=1) + 1.0)
            before_L[rows] += weights_M
            before_L += weights_M @ mean_ML
        row_L = before_L
        # An estimate of weights may be negative; rounding in float32 is not meant.
        if not row_L.min() > -1e-6:
            raise UserError(
                "rollout multiplies distributions over positions, and rows of the maps of "
                f"attention={model.description.attention} are not: weights may be negative "
                "(docs/mechanisms.md); use a model with another attention, or read its maps: "
                "protlm attention"
            )
    return row_L.cpu()
