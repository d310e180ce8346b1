"""Linear attention in an exported graph, whose batch and length are free.

The loops over tiles of `function.py` would be a graph of one length. Here all positions are one
tile. In causal attention, the states before the chunks are cumulative sums, so that time and memory
are linear in the length there too.
"""

import torch.nn.functional as F
from torch import Tensor

from protlm.attention.linearized.function import Weighting
from protlm.attention.linearized.operands import Operands
from protlm.attention.linearized.tiles import WHOLE, chunked
from protlm.attention.ops.blocks import from_blocks
from protlm.attention.ops.numerics import no_autocast, zero_padding


def graph_attention(
    q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, mask_BL: Tensor, weighting: Weighting
) -> Tensor:
    """Returns what `LinearAttention` returns, up to rounding, as operations on whole tensors."""
    feature_map, normalizer, causal, _ = weighting
    operands = Operands(q_BHLK, k_BHLK, v_BHLC, mask_BL, feature_map)
    with no_autocast(v_BHLC):
        if not causal:
            operands.raise_reference(WHOLE)
        phi_k_BHLR = operands.keys(WHOLE, causal=causal).phi_BHLR
        phi_q_BHLR = operands.queries(WHOLE).phi_BHLR
        values = zero_padding(F.pad(v_BHLC.to(operands.dtype), (0, 1), value=1.0), mask_BL)
        if causal:
            sums = _causal_sums(phi_q_BHLR, phi_k_BHLR, values)
        else:
            sums = phi_q_BHLR @ (phi_k_BHLR.mT @ values)
        out_BHLC, _ = normalizer(sums)
    return zero_padding(out_BHLC, mask_BL).to(v_BHLC.dtype)


def _causal_sums(phi_q_BHLR: Tensor, phi_k_BHLR: Tensor, values: Tensor) -> Tensor:
    phi_q, phi_k, chunks = (chunked(x) for x in (phi_q_BHLR, phi_k_BHLR, values))
    # Each state is moved to the next chunk.
    before = F.pad((phi_k.mT @ chunks).cumsum(dim=2), (0, 0, 0, 0, 1, -1))
    sums = (phi_q @ phi_k.mT).tril() @ chunks + phi_q @ before
    return from_blocks(sums, values.shape[2])
