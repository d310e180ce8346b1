"""Attention rollout for one target position, without an L×L map.

Abnar and Zuidema 2020 (arXiv 2005.00928, section 3): with A the mean map of the heads of a layer,
Ã = (A + I) / 2, its rows normalized, and the rollout is the product Ã_N ... Ã_1.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from protlm.attention.maps import attention_rows
from protlm.model.pretrained import PretrainedModel
from protlm.model.selfattention import AttentionInputs
from protlm.system.errors import UserError


def rollout(model: PretrainedModel, sequence: str, position: int) -> Tensor:
    """Returns the rollout of one position to each input token, float64 L, with special tokens.

    The row of the target is propagated from the last layer to the first. For a mechanism whose
    outputs are its map times the values, a layer takes one pass forward and one backward with one
    value channel, at the cost of the mechanism: linear in L for linear attention. The maps of the
    others are read in blocks of rows. Queries and keys of all layers are in memory.
    Residual connections count as one half; values and feed-forward layers are ignored.

    Args:
        model: the model.
        sequence: residues.
        position: the target; 0 is `<cls>`, n the nth residue, and the last is `<eos>`.
    """
    batch = model.tokenize([sequence])
    with torch.inference_mode():
        inputs = dict(
            model.network.attention_inputs(batch.tokens_BL, batch.mask_BL, causal=model.causal)
        )
    row_L = torch.zeros(batch.tokens_BL.shape[1], dtype=torch.float64, device=model.device)
    row_L[position] = 1.0
    for layer in range(model.num_layers, 0, -1):
        operator = _Operator(model, layer, inputs.pop(layer), batch.mask_BL)
        sums_L = operator.row_sums()
        row_L = row_L / (0.5 * (sums_L + 1.0))
        row_L = 0.5 * (row_L + operator.transposed_product(row_L))
        # An estimate of weights may be negative; rounding in float32 is not meant.
        if not row_L.min() > -1e-6:
            raise UserError(
                "rollout multiplies distributions over positions, and rows of the maps of "
                f"attention={model.description.attention} are not: weights may be negative "
                "(docs/mechanisms.md); use a model with another attention, or read its maps: "
                "protlm attention"
            )
    return row_L.cpu()


class _Operator:
    """The mean map of the heads of a layer, as a linear function of rows."""

    def __init__(
        self, model: PretrainedModel, layer: int, x: AttentionInputs, mask_BL: Tensor
    ) -> None:
        self._mechanism, self._causal = model.network.mechanism(layer), model.causal
        # Tensors of inference mode cannot have gradients.
        self._q_BHLK, self._k_BHLK = x.q_BHLK.clone(), x.k_BHLK.clone()
        self._named = {
            "hidden_BLD": x.hidden_BLD.clone(),
            "mask_BL": mask_BL.clone(),
            "causal": self._causal,
        }
        self._is_linear = self._mechanism.is_map_times_values

    def row_sums(self) -> Tensor:
        """Returns the sums of the rows, float64 L."""
        if not self._is_linear:
            return torch.cat([block_ML.sum(dim=1) for _, block_ML in self._blocks()])
        ones_BHL1 = torch.ones_like(self._q_BHLK[..., :1])
        with torch.no_grad():
            out_BHL1 = self._mechanism(self._q_BHLK, self._k_BHLK, ones_BHL1, **self._named)
        return out_BHL1[0, :, :, 0].double().mean(dim=0)

    def transposed_product(self, row_L: Tensor) -> Tensor:
        """Returns Aᵀ r, float64 L."""
        if not self._is_linear:
            total_L = torch.zeros_like(row_L)
            for rows, block_ML in self._blocks():
                total_L += row_L[rows] @ block_ML
            return total_L
        with torch.enable_grad():
            v_BHL1 = torch.zeros_like(self._q_BHLK[..., :1]).requires_grad_()
            out_BHL1 = self._mechanism(self._q_BHLK, self._k_BHLK, v_BHL1, **self._named)
            r_BHL1 = row_L.to(out_BHL1.dtype)[None, None, :, None].expand_as(out_BHL1)
            (gradient_BHL1,) = torch.autograd.grad(out_BHL1, v_BHL1, r_BHL1.contiguous())
        return gradient_BHL1[0, :, :, 0].double().mean(dim=0)

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields the mean map in blocks of rows, float64 ML."""
        blocks = attention_rows(self._mechanism, self._q_BHLK, self._k_BHLK, **self._named)
        for rows, map_BHML in blocks:
            yield rows, map_BHML[0].double().mean(dim=0)
