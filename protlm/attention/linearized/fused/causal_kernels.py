"""Triton kernels of causal linear attention with ReLU or positive features, and their gradients.

With features of queries and of keys, φq and φk, the output is, in blocks,

    S_r = Σ_j φk_r(j) v_j,  z_r = Σ_j φk_r(j)       over the keys before the block: its state
    A_ij = Σ_r φq_r(i) φk_r(j)                      for j ≤ i within the block
    O_i = (Σ_r φq_r(i) S_r + Σ_j A_ij v_j) / D_i,   D_i = Σ_r φq_r(i) z_r + Σ_j A_ij

and with p_r(i) = φq_r(i) / D_i, d_i = -dO_i·O_i and dA_ij = dO_i·v_j + d_i the gradients are

    dS_r = Σ_i p_r(i) dO_i,  dz_r = Σ_i p_r(i) d_i  over the queries after the block
    D_i dφq_r(i) = dO_i·S_r + d_i z_r + Σ_j dA_ij φk_r(j)
    dφk_r(j) = v_j·dS_r + dz_r + Σ_i dA_ij p_r(i)
    dv_j = Σ_r φk_r(j) dS_r + Σ_i A_ij dO_i / D_i

Features are relu(w_r·x) + ε, or, where constants c are given, powers of 2 with the exponents

    a_ir = w_r·q_i + c_r + M_r,   b_jr = w_r·k_j - |k_j|² log₂e / (2√K) - M_r

relative to a reference M_r, as in `linearized.operands`: the exponent of the first key,
without M_r. b_jr is cut at 64, so that products are finite.

States are stored block by block, (blocks of all samples, H, R, C) and (blocks, H, R).
Products with values are in the dtype of the values, and their sums in float32, as is all else. The
other kernels are in `shared_kernels`, whose programs are numbered as here.
"""

# Functions of Triton seem never to return.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from protlm.attention.linearized.fused.blocks import (
    LN_2,
    load_mask,
    load_matrix,
    load_numbers,
    load_rows,
    load_shift,
    multiply,
    project_split,
    state_row,
    store_rows,
    whole_block,
)
from protlm.attention.linearized.fused.shared_kernels import key_features


@triton.jit
def _query_weights(
    q_block, w_block, bias, epsilon, references, head, total, features,
    R: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Returns p, with a row for each query."""
    weights = project_split(q_block, w_block, PRECISE)
    if bias is None:
        weights = (tl.maximum(weights, 0.0) + epsilon) / total[:, None]
    else:
        shift = load_shift(bias, references, head, features, R)
        weights = tl.exp2(weights + shift[None, :] - total[:, None])
    return weights


@triton.jit(do_not_specialize=["length"])
def value_gradients(
    q, k, mask, blocks, w, bias, epsilon, references, totals, dout, s, dv,
    num_heads, length, R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BL: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Computes dv of a block; the matrix of weights has a row for each key."""
    head, low, end = whole_block(num_heads, length, BL)
    if blocks is not None:
        block = blocks + 3 * tl.program_id(1)
        sample, low, end = tl.load(block), tl.load(block + 1), tl.load(block + 2)
        if low >= end:
            return
        head = sample * num_heads + tl.program_id(0)
    own_head = head % num_heads
    rows = tl.arange(0, BL)
    positions = low + rows
    is_seen = load_mask(mask, positions, end)
    q_block = load_rows(q, own_head, num_heads, positions, is_seen, BK, K)
    k_block = load_rows(k, own_head, num_heads, positions, is_seen, BK, K)
    place = positions * num_heads + own_head
    total = tl.load(totals + place, mask=is_seen, other=float("inf"))
    dtype: tl.constexpr = dv.dtype.element_ty
    weights = tl.full([BL, BL], 0.0, tl.float32)
    dv_block = tl.full([BL, BC], 0.0, tl.float32)
    for start in range(0, R, BR):
        features = start + tl.arange(0, BR)
        w_block = load_matrix(w, 0, features, R, BK, K)
        phi_q = _query_weights(
            q_block, w_block, bias, epsilon, references, head, total, features, R, PRECISE
        )
        phi = key_features(
            k_block, w_block, bias, epsilon, references, head, is_seen, features, R, K, PRECISE
        )
        weights += multiply(phi, tl.trans(phi_q), dtype, PRECISE)
        first = state_row(R)
        ds_block = load_matrix(s, first, features, R, BC, C)
        dv_block += multiply(phi, ds_block, dtype, PRECISE)
    weights = tl.where(rows[:, None] <= rows[None, :], weights, 0.0)
    dout_block = load_rows(dout, own_head, num_heads, positions, is_seen, BC, C)
    dv_block += multiply(weights, dout_block, dtype, PRECISE)
    store_rows(dv, own_head, num_heads, positions, end, dv_block, BC, C)


@triton.jit(do_not_specialize=["length"])
def key_gradients(
    q, k, v, mask, blocks, w, bias, epsilon, references, totals, dout, along, s, z, dk,
    num_heads, length, R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BL: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Computes dk of a block; the matrix of weights has a row for each key."""
    head, low, end = whole_block(num_heads, length, BL)
    if blocks is not None:
        block = blocks + 3 * tl.program_id(1)
        sample, low, end = tl.load(block), tl.load(block + 1), tl.load(block + 2)
        if low >= end:
            return
        head = sample * num_heads + tl.program_id(0)
    own_head = head % num_heads
    rows = tl.arange(0, BL)
    positions = low + rows
    is_seen = load_mask(mask, positions, end)
    q_block = load_rows(q, own_head, num_heads, positions, is_seen, BK, K)
    k_block = load_rows(k, own_head, num_heads, positions, is_seen, BK, K)
    v_block = load_rows(v, own_head, num_heads, positions, is_seen, BC, C)
    dout_block = load_rows(dout, own_head, num_heads, positions, is_seen, BC, C)
    place = positions * num_heads + own_head
    total = tl.load(totals + place, mask=is_seen, other=float("inf"))
    along_block = tl.load(along + place, mask=is_seen, other=0.0)
    dtype: tl.constexpr = v.dtype.element_ty
    dweights = multiply(v_block, tl.trans(dout_block), dtype, PRECISE) + along_block[None, :]
    dweights = tl.where(rows[:, None] <= rows[None, :], dweights, 0.0)
    dk_block = tl.full([BL, BK], 0.0, tl.float32)
    dsquare = tl.full([BL], 0.0, tl.float32)
    for start in range(0, R, BR):
        features = start + tl.arange(0, BR)
        w_block = load_matrix(w, 0, features, R, BK, K)
        first = state_row(R)
        ds_block = load_matrix(s, first, features, R, BC, C)
        dz_block = load_numbers(z, first, features, 0.0, R)
        phi_q = _query_weights(
            q_block, w_block, bias, epsilon, references, head, total, features, R, PRECISE
        )
        dphi = multiply(v_block, tl.trans(ds_block), dtype, PRECISE) + dz_block[None, :]
        dphi += multiply(dweights, phi_q, dtype, PRECISE)
        phi = key_features(
            k_block, w_block, bias, epsilon, references, head, is_seen, features, R, K, PRECISE
        )
        if bias is None:
            dphi = tl.where(phi > epsilon, dphi, 0.0)
        else:
            dphi *= phi * LN_2
            dsquare += tl.sum(dphi, axis=1)
        dk_block += multiply(dphi, w_block, dtype, PRECISE)
    if bias is not None:
        # Loaded with another mask, and therefore again: kept, it would take registers in the loop.
        is_seen = is_seen & (positions < end)
        k_block = load_rows(k, own_head, num_heads, positions, is_seen, BK, K)
        dk_block -= k_block.to(tl.float32) * (dsquare / (LN_2 * K**0.5))[:, None]
    store_rows(dk, own_head, num_heads, positions, end, dk_block, BK, K)
