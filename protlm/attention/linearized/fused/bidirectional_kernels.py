"""Triton kernels of bidirectional linear attention with ReLU or positive features.

With the features f_r(x) = relu(w_r·x) + ε (arXiv 2009.14794, A.4) the output is

    S_r = Σ_j f_r(k_j) v_j,   z_r = Σ_j f_r(k_j)
    O_i = Σ_r f_r(q_i) S_r / D_i,   D_i = Σ_r f_r(q_i) z_r

and with P_ir = f_r(q_i) / D_i and d_i = -dO_i·O_i the gradients are

    dS_r = Σ_i P_ir dO_i,                         dz_r = Σ_i P_ir d_i
    df_r(q_i) = (dO_i·S_r + d_i z_r) / D_i,       df_r(k_j) = v_j·dS_r + dz_r
    dv_j = Σ_r f_r(k_j) dS_r

Where constants c are given, features are powers of 2, FAVOR+: with rows w_r, which are
s ω_r log₂e / K^(1/4), the exponents of a key and of a query are

    b_rj = w_r·k_j - |k_j|² log₂e / (2√K),   a_ir = w_r·q_i + c_r

Rows attend to keys, and queries attend to rows: eq. 4, written as two softmax attentions,

    S_r = Σ_j 2^(b_rj - z_r) v_j,         z_r = log₂ Σ_j 2^b_rj
    O_i = Σ_r 2^(a_ir + z_r - n_i) S_r,   n_i = log₂ Σ_r 2^(a_ir + z_r)

These exponents are at most 0, so that nothing overflows, and the largest terms are near 1, so that
no ε is needed. With P_ir = 2^(a_ir + z_r - n_i) and P'_rj = 2^(b_rj - z_r), dS and dz are as above,
and the other gradients (of a and b in natural logarithms) are

    da_ir = P_ir (dO_i·S_r + d_i),        db_rj = P'_rj (dS_r·v_j + dz_r)
    dv_j = Σ_r P'_rj dS_r

Products with values are in the dtype of the values, and their sums in float32, as is all else. The
other kernels are in `shared_kernels`.
"""

# Functions of Triton seem never to return.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from protlm.attention.linearized.fused.blocks import (
    LN_2,
    half_square,
    load_mask,
    load_matrix,
    load_numbers,
    load_rows,
    multiply,
    project,
    store_rows,
    whole_block,
)


@triton.jit(do_not_specialize=["length"])
def key_gradients(
    k, v, mask, blocks, w, bias, epsilon, references, s, z, dk, dv,
    num_heads, length, R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BL: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Computes dk and dv of a block of keys from dS and dz; the references are z."""
    head, low, end = whole_block(num_heads, length, BL)
    if blocks is not None:
        block = blocks + 3 * tl.program_id(1)
        sample, low, end = tl.load(block), tl.load(block + 1), tl.load(block + 2)
        if low >= end:
            return
        head = sample * num_heads + tl.program_id(0)
    own_head = head % num_heads
    positions = low + tl.arange(0, BL)
    is_seen = load_mask(mask, positions, end)
    k_block = load_rows(k, own_head, num_heads, positions, is_seen, BK, K)
    v_block = load_rows(v, own_head, num_heads, positions, is_seen, BC, C)
    half_squares = tl.where(is_seen, half_square(k_block, K), float("inf"))
    dtype: tl.constexpr = v.dtype.element_ty
    dk_block = tl.full([BL, BK], 0.0, tl.float32)
    dv_block = tl.full([BL, BC], 0.0, tl.float32)
    dsquare = tl.full([BL], 0.0, tl.float32)
    for start in range(0, R, BR):
        features = start + tl.arange(0, BR)
        first = head.to(tl.int64) * R
        w_block = load_matrix(w, 0, features, R, BK, K)
        ds_block = load_matrix(s, first, features, R, BC, C)
        dz_block = load_numbers(z, first, features, 0.0, R)
        projected = project(k_block, w_block, PRECISE)
        if bias is None:
            phi = tl.where(is_seen[:, None], tl.maximum(projected, 0.0) + epsilon, 0.0)
        else:
            log_sum = load_numbers(references, first, features, float("inf"), R)
            phi = tl.exp2(projected - half_squares[:, None] - log_sum[None, :])
        dv_block += multiply(phi, ds_block, dtype, PRECISE)
        dphi = multiply(v_block, tl.trans(ds_block), dtype, PRECISE) + dz_block[None, :]
        if bias is None:
            dphi = tl.where(projected > 0, dphi, 0.0)
        else:
            dphi *= phi
            dsquare += tl.sum(dphi, axis=1)
        dk_block += multiply(dphi, w_block, dtype, PRECISE)
    if bias is not None:
        dk_block = dk_block * LN_2 - k_block.to(tl.float32) * (dsquare / K**0.5)[:, None]
    store_rows(dk, own_head, num_heads, positions, end, dk_block, BK, K)
    store_rows(dv, own_head, num_heads, positions, end, dv_block, BC, C)
