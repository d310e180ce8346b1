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

Products with values are in the dtype of the values, and their sums in float32, as is all else.
A program has one head: on axis 0 are the heads of all samples, each times the blocks of features if
S or dS is computed; on axis 1 the blocks of positions, or the chunks of a sum over positions.
"""

# The sizes S are a `Sizes` within kernels.
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from protlm.attention.linearized.fused.blocks import (
    LN_2,
    half_square,
    load_mask,
    load_matrix,
    load_numbers,
    load_rows,
    load_shift,
    multiply,
    project,
    project_transposed,
    store_matrix,
    store_rows,
)

# Far below any exponent, and finite, so that differences are not NaN.
_LOWEST = tl.constexpr(-1e30)


@triton.jit(do_not_specialize=["length", "chunk_length"])
def sum_keys(
    k, v, mask, w, bias, epsilon, s, z, num_heads, length, chunk_length, S: tl.constexpr
):  # fmt: skip
    """Computes S and z of a block of features over a chunk of the keys."""
    blocks: tl.constexpr = tl.cdiv(S.R, S.BR)
    head, chunk = tl.program_id(0) // blocks, tl.program_id(1)
    features = tl.program_id(0) % blocks * S.BR + tl.arange(0, S.BR)
    w_block = load_matrix(w, 0, features, S.R, S.BK, S.K)
    highest = tl.full([S.BR], _LOWEST, tl.float32)
    s_block = tl.full([S.BR, S.BC], 0.0, tl.float32)
    z_block = tl.full([S.BR], 0.0, tl.float32)
    end = tl.minimum((chunk + 1) * chunk_length, length)
    for start in range(chunk * chunk_length, end, S.BL):
        positions = start + tl.arange(0, S.BL)
        is_seen = load_mask(mask, head, num_heads, positions, length)
        k_block = load_rows(k, head, num_heads, positions, is_seen, S.BK, S.K)
        v_block = load_rows(v, head, num_heads, positions, is_seen, S.BC, S.C)
        projected = project_transposed(k_block, w_block, S.is_precise)
        if bias is None:
            phi = tl.where(is_seen[None, :], tl.maximum(projected, 0.0) + epsilon, 0.0)
        else:
            exponents = projected - half_square(k_block, S.K)[None, :]
            exponents = tl.where(is_seen[None, :], exponents, float("-inf"))
            raised = tl.maximum(highest, tl.max(exponents, axis=1))
            phi = tl.exp2(exponents - raised[:, None])
            factor = tl.exp2(highest - raised)
            s_block, z_block = s_block * factor[:, None], z_block * factor
            highest = raised
        s_block += multiply(phi, v_block, v.pointer.dtype.element_ty, S.is_precise)
        z_block += tl.sum(phi, axis=1)
    if bias is not None:
        # A chunk may be all padding.
        has_keys = z_block > 0
        total = tl.where(has_keys, z_block, 1.0)
        s_block = s_block / total[:, None]
        z_block = tl.where(has_keys, highest + tl.log2(total), _LOWEST)
    first = (chunk * (tl.num_programs(0) // blocks) + head).to(tl.int64) * S.R
    tl.store(z + first + features, z_block, mask=features < S.R)
    store_matrix(s, first, features, S.R, S.BC, S.C, s_block)


@triton.jit(do_not_specialize=["length"])
def attend(q, mask, w, bias, epsilon, s, z, out, totals, num_heads, length, S: tl.constexpr):
    """Computes O, and D or n, of a block of queries."""
    head = tl.program_id(0)
    positions = tl.program_id(1) * S.BL + tl.arange(0, S.BL)
    is_seen = load_mask(mask, head, num_heads, positions, length)
    q_block = load_rows(q, head, num_heads, positions, is_seen, S.BK, S.K)
    highest = tl.full([S.BL], float("-inf"), tl.float32)
    total = tl.full([S.BL], 0.0, tl.float32)
    sums = tl.full([S.BL, S.BC], 0.0, tl.float32)
    for start in range(0, S.R, S.BR):
        features = start + tl.arange(0, S.BR)
        first = head.to(tl.int64) * S.R
        w_block = load_matrix(w, 0, features, S.R, S.BK, S.K)
        s_block = load_matrix(s, first, features, S.R, S.BC, S.C)
        projected = project(q_block, w_block, S.is_precise)
        if bias is None:
            z_block = load_numbers(z, first, features, 0.0, S)
            phi = tl.maximum(projected, 0.0) + epsilon
            total += tl.sum(phi * z_block[None, :], axis=1)
        else:
            exponents = projected + load_shift(bias, z, head, features, S)[None, :]
            raised = tl.maximum(highest, tl.max(exponents, axis=1))
            phi = tl.exp2(exponents - raised[:, None])
            factor = tl.exp2(highest - raised)
            total = total * factor + tl.sum(phi, axis=1)
            sums = sums * factor[:, None]
            highest = raised
        sums += multiply(phi, s_block, out.pointer.dtype.element_ty, S.is_precise)
    # Without keys, or without ε, a query may have no weight.
    total = tl.where(is_seen & (total > 0), total, float("inf"))
    store_rows(out, head, num_heads, positions, length, S.BC, S.C, sums / total[:, None])
    if bias is not None:
        total = highest + tl.log2(total)
    first = head.to(tl.int64) * length
    tl.store(totals + first + positions, total, mask=positions < length)


@triton.jit(do_not_specialize=["length"])
def query_gradients(
    q, mask, w, bias, s, z, out, totals, dout, dq, along, num_heads, length, S: tl.constexpr
):  # fmt: skip
    """Computes dq, and d / D or d, of a block of queries."""
    head = tl.program_id(0)
    positions = tl.program_id(1) * S.BL + tl.arange(0, S.BL)
    is_seen = load_mask(mask, head, num_heads, positions, length)
    q_block = load_rows(q, head, num_heads, positions, is_seen, S.BK, S.K)
    out_block = load_rows(out, head, num_heads, positions, is_seen, S.BC, S.C).to(tl.float32)
    dout_block = load_rows(dout, head, num_heads, positions, is_seen, S.BC, S.C)
    place = head.to(tl.int64) * length + positions
    total = tl.load(totals + place, mask=is_seen, other=float("inf"))
    along_block = -tl.sum(out_block * dout_block.to(tl.float32), axis=1)
    stored = along_block / total if bias is None else along_block
    tl.store(along + place, stored, mask=positions < length)
    dtype: tl.constexpr = out.pointer.dtype.element_ty
    dq_block = tl.full([S.BL, S.BK], 0.0, tl.float32)
    for start in range(0, S.R, S.BR):
        features = start + tl.arange(0, S.BR)
        first = head.to(tl.int64) * S.R
        w_block = load_matrix(w, 0, features, S.R, S.BK, S.K)
        s_block = load_matrix(s, first, features, S.R, S.BC, S.C)
        projected = project(q_block, w_block, S.is_precise)
        dphi = multiply(dout_block, tl.trans(s_block), dtype, S.is_precise)
        if bias is None:
            z_block = load_numbers(z, first, features, 0.0, S)
            dphi = (dphi + along_block[:, None] * z_block[None, :]) / total[:, None]
            dphi = tl.where(projected > 0, dphi, 0.0)
        else:
            exponents = projected + load_shift(bias, z, head, features, S)[None, :]
            weights = tl.exp2(exponents - total[:, None])
            dphi = weights * (dphi + along_block[:, None])
        dq_block += multiply(dphi, w_block, dtype, S.is_precise)
    if bias is not None:
        dq_block *= LN_2
    store_rows(dq, head, num_heads, positions, length, S.BK, S.K, dq_block)


@triton.jit(do_not_specialize=["length", "chunk_length"])
def sum_queries(
    q, mask, w, bias, epsilon, z, totals, dout, along, ds, dz, num_heads, length, chunk_length,
    S: tl.constexpr,
):  # fmt: skip
    """Computes dS and dz of a block of features over a chunk of the queries."""
    blocks: tl.constexpr = tl.cdiv(S.R, S.BR)
    head, chunk = tl.program_id(0) // blocks, tl.program_id(1)
    features = tl.program_id(0) % blocks * S.BR + tl.arange(0, S.BR)
    w_block = load_matrix(w, 0, features, S.R, S.BK, S.K)
    if bias is not None:
        shift = load_shift(bias, z, head, features, S)
    ds_block = tl.full([S.BR, S.BC], 0.0, tl.float32)
    dz_block = tl.full([S.BR], 0.0, tl.float32)
    end = tl.minimum((chunk + 1) * chunk_length, length)
    for start in range(chunk * chunk_length, end, S.BL):
        positions = start + tl.arange(0, S.BL)
        is_seen = load_mask(mask, head, num_heads, positions, length)
        q_block = load_rows(q, head, num_heads, positions, is_seen, S.BK, S.K)
        dout_block = load_rows(dout, head, num_heads, positions, is_seen, S.BC, S.C)
        place = head.to(tl.int64) * length + positions
        total = tl.load(totals + place, mask=is_seen, other=float("inf"))
        along_block = tl.load(along + place, mask=is_seen, other=0.0)
        projected = project_transposed(q_block, w_block, S.is_precise)
        if bias is None:
            phi = tl.maximum(projected, 0.0) + epsilon
            weights = phi / total[None, :]
        else:
            weights = tl.exp2(projected + shift[:, None] - total[None, :])
            phi = weights
        ds_block += multiply(weights, dout_block, dout.pointer.dtype.element_ty, S.is_precise)
        dz_block += tl.sum(phi * along_block[None, :], axis=1)
    first = (chunk * (tl.num_programs(0) // blocks) + head).to(tl.int64) * S.R
    tl.store(dz + first + features, dz_block, mask=features < S.R)
    store_matrix(ds, first, features, S.R, S.BC, S.C, ds_block)


@triton.jit(do_not_specialize=["length"])
def key_gradients(
    k, v, mask, w, bias, epsilon, z, ds, dz, dk, dv, num_heads, length, S: tl.constexpr
):  # fmt: skip
    """Computes dk and dv of a block of keys."""
    head = tl.program_id(0)
    positions = tl.program_id(1) * S.BL + tl.arange(0, S.BL)
    is_seen = load_mask(mask, head, num_heads, positions, length)
    k_block = load_rows(k, head, num_heads, positions, is_seen, S.BK, S.K)
    v_block = load_rows(v, head, num_heads, positions, is_seen, S.BC, S.C)
    half_squares = tl.where(is_seen, half_square(k_block, S.K), float("inf"))
    dtype: tl.constexpr = v.pointer.dtype.element_ty
    dk_block = tl.full([S.BL, S.BK], 0.0, tl.float32)
    dv_block = tl.full([S.BL, S.BC], 0.0, tl.float32)
    dsquare = tl.full([S.BL], 0.0, tl.float32)
    for start in range(0, S.R, S.BR):
        features = start + tl.arange(0, S.BR)
        first = head.to(tl.int64) * S.R
        w_block = load_matrix(w, 0, features, S.R, S.BK, S.K)
        ds_block = load_matrix(ds, first, features, S.R, S.BC, S.C)
        dz_block = load_numbers(dz, first, features, 0.0, S)
        projected = project(k_block, w_block, S.is_precise)
        if bias is None:
            phi = tl.where(is_seen[:, None], tl.maximum(projected, 0.0) + epsilon, 0.0)
        else:
            log_sum = load_numbers(z, first, features, float("inf"), S)
            phi = tl.exp2(projected - half_squares[:, None] - log_sum[None, :])
        dv_block += multiply(phi, ds_block, dtype, S.is_precise)
        dphi = multiply(v_block, tl.trans(ds_block), dtype, S.is_precise) + dz_block[None, :]
        if bias is None:
            dphi = tl.where(projected > 0, dphi, 0.0)
        else:
            dphi *= phi
            dsquare += tl.sum(dphi, axis=1)
        dk_block += multiply(dphi, w_block, dtype, S.is_precise)
    if bias is not None:
        dk_block = dk_block * LN_2 - k_block.to(tl.float32) * (dsquare / S.K**0.5)[:, None]
    store_rows(dk, head, num_heads, positions, length, S.BK, S.K, dk_block)
    store_rows(dv, head, num_heads, positions, length, S.BC, S.C, dv_block)
