"""Bidirectional linear attention: O = φ(Q) φ(K)ᵀ[V | 1], normalized (arXiv 2009.14794, eq. 4).

Features are computed a tile at a time, and recomputed in the backward pass. Tensors without a
suffix have the samples, heads and positions of a tile; values and sums include the column of the
denominator, and the state is the sum of [v | 1]ᵀφ(k) over the keys, (C + 1, R) for each head.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from protlm.attention.linearized.features import FeatureMap
from protlm.attention.linearized.normalization import Normalizer
from protlm.attention.linearized.operands import Operands, empty_output
from protlm.attention.linearized.tile_features import TileFeatures
from protlm.attention.ops.numerics import no_autocast
from protlm.attention.ops.products import product
from protlm.attention.ops.tiles import tiles


class BidirectionalAttention(torch.autograd.Function):
    """`apply(q, k, v, mask, feature map, normalizer)` returns the output, BHLC, like v."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BHLK: Tensor,
        k_BHLK: Tensor,
        v_BHLC: Tensor,
        mask_BL: Tensor,
        feature_map: FeatureMap,
        normalizer: Normalizer,
    ) -> Tensor:
        """Sums [v | 1]ᵀφ(k) over each sequence, and multiplies the sum by the query features."""
        operands = Operands(q_BHLK, k_BHLK, v_BHLC, mask_BL)
        dtype = operands.product_dtype
        out_BHLC = empty_output(v_BHLC)
        saved_BHL1 = torch.empty_like(v_BHLC[..., :1], dtype=operands.dtype)
        states: list[Tensor] = []
        references: list[Tensor | None] = []
        num_features = feature_map.num_features(q_BHLK.shape[-1])
        groups = list(tiles(q_BHLK, num_features=num_features))
        with no_autocast(v_BHLC):
            for group in groups:
                features = TileFeatures(operands, feature_map)
                state = features.add_keys(None, group[0])
                for tile in group[1:]:
                    state = features.add_keys(state, tile)
                for tile in group:
                    phi = features.queries(tile).phi_BHLR
                    normalized = normalizer(product(phi, state, dtype=dtype))
                    tile.of(out_BHLC)[:], tile.of(saved_BHL1)[:] = normalized
                    operands.clear_padding(tile.of(out_BHLC), tile)
                states.append(state)
                references.append(features.reference_BH1R)
        ctx.settings = feature_map, normalizer, groups
        # The projection is saved so that a redraw before the backward pass is an error.
        inputs = q_BHLK, k_BHLK, v_BHLC, mask_BL, feature_map.projection_RK
        ctx.save_for_backward(*inputs, out_BHLC, saved_BHL1, *states, *references)
        return out_BHLC

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Computes dq and the gradient of the sum tile by tile, then dk and dv."""
        (dout_BHLC,) = grad_outputs
        # Accessed once: activation checkpointing does not allow a second access.
        q_BHLK, k_BHLK, v_BHLC, mask_BL, _, out_BHLC, saved_BHL1, *rest = ctx.saved_tensors
        feature_map, normalizer, groups = ctx.settings
        operands = Operands(q_BHLK, k_BHLK, v_BHLC, mask_BL)
        dtype = operands.product_dtype
        dq_BHLK, dk_BHLK, dv_BHLC = (torch.empty_like(x) for x in (q_BHLK, k_BHLK, v_BHLC))
        with no_autocast(out_BHLC):
            for group, state, reference in zip(
                groups, rest[: len(groups)], rest[len(groups) :], strict=True
            ):
                features = TileFeatures(operands, feature_map, reference)
                dstate = torch.zeros_like(state)
                for tile in group:
                    dsums = normalizer.gradient(
                        tile.of(dout_BHLC),
                        tile.of(out_BHLC).to(operands.dtype),
                        tile.of(saved_BHL1),
                    )
                    operands.clear_padding(dsums, tile)
                    phi, pullback = features.queries(tile)
                    dstate += product(dsums.mT.contiguous(), phi.mT, dtype=dtype)
                    tile.of(dq_BHLK)[:] = pullback(product(dsums, state.mT, dtype=dtype))
                dvalues, dones = dstate[..., :-1, :], dstate[..., -1, :]
                for tile in group:
                    phi, pullback = features.keys(tile)
                    tile.of(dv_BHLC)[:] = product(phi, dvalues, dtype=dtype)
                    dphi = product(operands.values(tile), dvalues.mT, dones, dtype=dtype)
                    tile.of(dk_BHLK)[:] = pullback(dphi)
                    for gradient in (dk_BHLK, dv_BHLC):
                        operands.clear_padding(tile.of(gradient), tile)
        return dq_BHLK, dk_BHLK, dv_BHLC, None, None, None
