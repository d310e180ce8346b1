"""Triton kernels of bidirectional FAVOR+: two softmax attentions, and their gradients.

With rows w_r, which are s ω_r log₂e / K^(1/4), the features of a key and of a query are powers of 2
with the exponents

    b_rj = w_r·k_j - |k_j|² log₂e / (2√K),   a_ir = w_r·q_i + c_r

Rows attend to keys, and queries attend to rows: arXiv 2009.14794, eq. 4, written as

    U_r = Σ_j 2^(b_rj - m_r) v_j,         m_r = log₂ Σ_j 2^b_rj
    O_i = Σ_r 2^(a_ir + m_r - n_i) U_r,   n_i = log₂ Σ_r 2^(a_ir + m_r)

These exponents are at most 0, so that nothing overflows, and the largest terms are near 1, so that
no ε is needed. With P_ir = 2^(a_ir + m_r - n_i), P'_rj = 2^(b_rj - m_r) and D_i = dO_i·O_i, the
gradients (of a and b in natural logarithms) are

    dU_r = Σ_i P_ir dO_i,                 d_r = -Σ_i P_ir D_i
    da_ir = P_ir (dO_i·U_r - D_i),        db_rj = P'_rj (dU_r·v_j + d_r)

Products with values are in the dtype of the values, and their sums in float32, as is all else.
A program has one head: on axis 0 are the heads of all samples, each times the blocks of features if
U or dU is computed; on axis 1 the blocks of positions, or the parts of a sum over positions.
"""

# The sizes S are a `Sizes` within kernels.
# pyright: reportAttributeAccessIssue=false

import triton
import triton.language as tl

from protlm.attention.linearized.fused.blocks import (
    load_mask,
    load_matrix,
    load_rows,
    multiply,
    project,
    project_transposed,
    store_matrix,
    store_rows,
)

# Far below any exponent, and finite, so that differences are not NaN.
_LOWEST = tl.constexpr(-1e30)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def half_square(k, K: tl.constexpr):
    """Returns |k|² log₂e / (2√K)."""
    k = k.to(tl.float32)
    return tl.sum(k * k, axis=1) * (0.5 / _LN_2 / K**0.5)


@triton.jit
def _load_shift(bias, log_sums, head, features, S: tl.constexpr):
    """Loads c_r + m_r; no feature outside has weight."""
    is_inside = features < S.R
    bias = tl.load(bias + features, mask=is_inside, other=float("-inf"))
    return bias + tl.load(log_sums + head.to(tl.int64) * S.R + features, mask=is_inside, other=0.0)


@triton.jit(do_not_specialize=["length", "part_length"])
def attend_to_keys(k, v, mask, w, u, log_sums, num_heads, length, part_length, S: tl.constexpr):
    """Computes U and m of a block of features over a part of the keys."""
    blocks: tl.constexpr = tl.cdiv(S.R, S.BR)
    head, part = tl.program_id(0) // blocks, tl.program_id(1)
    features = tl.program_id(0) % blocks * S.BR + tl.arange(0, S.BR)
    w_block = load_matrix(w, 0, features, S.R, S.BK, S.K)
    highest = tl.full([S.BR], _LOWEST, tl.float32)
    total = tl.full([S.BR], 0.0, tl.float32)
    sums = tl.full([S.BR, S.BC], 0.0, tl.float32)
    end = tl.minimum((part + 1) * part_length, length)
    for start in range(part * part_length, end, S.BL):
        positions = start + tl.arange(0, S.BL)
        is_seen = load_mask(mask, head, num_heads, positions, length)
        k_block = load_rows(k, head, num_heads, positions, is_seen, S.BK, S.K)
        v_block = load_rows(v, head, num_heads, positions, is_seen, S.BC, S.C)
        exponents = project_transposed(k_block, w_block, S.is_precise)
        exponents -= half_square(k_block, S.K)[None, :]
        exponents = tl.where(is_seen[None, :], exponents, float("-inf"))
        raised = tl.maximum(highest, tl.max(exponents, axis=1))
        weights = tl.exp2(exponents - raised[:, None])
        factor = tl.exp2(highest - raised)
        total = total * factor + tl.sum(weights, axis=1)
        increment = multiply(weights, v_block, v.pointer.dtype.element_ty, S.is_precise)
        sums = sums * factor[:, None] + increment
        highest = raised
    # A part may be all padding.
    has_keys = total > 0
    total = tl.where(has_keys, total, 1.0)
    log_sum = tl.where(has_keys, highest + tl.log2(total), _LOWEST)
    first = (part * (tl.num_programs(0) // blocks) + head).to(tl.int64) * S.R
    tl.store(log_sums + first + features, log_sum, mask=features < S.R)
    store_matrix(u, first, features, S.R, S.BC, S.C, sums / total[:, None])


@triton.jit(do_not_specialize=["length"])
def attend_to_features(
    q, mask, w, bias, u, log_sums, out, log_totals, num_heads, length, S: tl.constexpr
):
    """Computes O and n of a block of queries."""
    head = tl.program_id(0)
    positions = tl.program_id(1) * S.BL + tl.arange(0, S.BL)
    is_seen = load_mask(mask, head, num_heads, positions, length)
    q_block = load_rows(q, head, num_heads, positions, is_seen, S.BK, S.K)
    highest = tl.full([S.BL], float("-inf"), tl.float32)
    total = tl.full([S.BL], 0.0, tl.float32)
    sums = tl.full([S.BL, S.BC], 0.0, tl.float32)
    for start in range(0, S.R, S.BR):
        features = start + tl.arange(0, S.BR)
        w_block = load_matrix(w, 0, features, S.R, S.BK, S.K)
        u_block = load_matrix(u, head.to(tl.int64) * S.R, features, S.R, S.BC, S.C)
        exponents = project(q_block, w_block, S.is_precise)
        exponents += _load_shift(bias, log_sums, head, features, S)[None, :]
        raised = tl.maximum(highest, tl.max(exponents, axis=1))
        weights = tl.exp2(exponents - raised[:, None])
        factor = tl.exp2(highest - raised)
        total = total * factor + tl.sum(weights, axis=1)
        increment = multiply(weights, u_block, out.pointer.dtype.element_ty, S.is_precise)
        sums = sums * factor[:, None] + increment
        highest = raised
    means = tl.where(is_seen[:, None], sums / total[:, None], 0.0)
    store_rows(out, head, num_heads, positions, length, S.BC, S.C, means)
    first = head.to(tl.int64) * length
    tl.store(log_totals + first + positions, highest + tl.log2(total), mask=positions < length)


@triton.jit(do_not_specialize=["length"])
def query_gradients(
    q, mask, w, bias, u, log_sums, out, log_totals, dout, dq, along, num_heads, length,
    S: tl.constexpr,
):  # fmt: skip
    """Computes dq and D of a block of queries."""
    head = tl.program_id(0)
    positions = tl.program_id(1) * S.BL + tl.arange(0, S.BL)
    is_seen = load_mask(mask, head, num_heads, positions, length)
    q_block = load_rows(q, head, num_heads, positions, is_seen, S.BK, S.K)
    out_block = load_rows(out, head, num_heads, positions, is_seen, S.BC, S.C)
    dout_block = load_rows(dout, head, num_heads, positions, is_seen, S.BC, S.C)
    along_block = tl.sum(out_block.to(tl.float32) * dout_block.to(tl.float32), axis=1)
    first = head.to(tl.int64) * length
    log_total = tl.load(log_totals + first + positions, mask=is_seen, other=0.0)
    tl.store(along + first + positions, along_block, mask=positions < length)
    dtype: tl.constexpr = out.pointer.dtype.element_ty
    dq_block = tl.full([S.BL, S.BK], 0.0, tl.float32)
    for start in range(0, S.R, S.BR):
        features = start + tl.arange(0, S.BR)
        w_block = load_matrix(w, 0, features, S.R, S.BK, S.K)
        u_block = load_matrix(u, head.to(tl.int64) * S.R, features, S.R, S.BC, S.C)
        exponents = project(q_block, w_block, S.is_precise)
        exponents += _load_shift(bias, log_sums, head, features, S)[None, :]
        weights = tl.exp2(exponents - log_total[:, None])
        dweights = multiply(dout_block, tl.trans(u_block), dtype, S.is_precise)
        dexponents = weights * (dweights - along_block[:, None])
        dq_block += multiply(dexponents, w_block, dtype, S.is_precise)
    # A padded query is 0, and may have any n.
    dq_block = tl.where(is_seen[:, None], dq_block * _LN_2, 0.0)
    store_rows(dq, head, num_heads, positions, length, S.BK, S.K, dq_block)


@triton.jit(do_not_specialize=["length", "part_length"])
def feature_gradients(
    q, mask, w, bias, log_sums, log_totals, dout, along, du, d, num_heads, length, part_length,
    S: tl.constexpr,
):  # fmt: skip
    """Computes dU and d of a block of features over a part of the queries."""
    blocks: tl.constexpr = tl.cdiv(S.R, S.BR)
    head, part = tl.program_id(0) // blocks, tl.program_id(1)
    features = tl.program_id(0) % blocks * S.BR + tl.arange(0, S.BR)
    w_block = load_matrix(w, 0, features, S.R, S.BK, S.K)
    shift = _load_shift(bias, log_sums, head, features, S)
    du_block = tl.full([S.BR, S.BC], 0.0, tl.float32)
    d_block = tl.full([S.BR], 0.0, tl.float32)
    end = tl.minimum((part + 1) * part_length, length)
    for start in range(part * part_length, end, S.BL):
        positions = start + tl.arange(0, S.BL)
        is_seen = load_mask(mask, head, num_heads, positions, length)
        q_block = load_rows(q, head, num_heads, positions, is_seen, S.BK, S.K)
        dout_block = load_rows(dout, head, num_heads, positions, is_seen, S.BC, S.C)
        place = head.to(tl.int64) * length + positions
        log_total = tl.load(log_totals + place, mask=is_seen, other=float("inf"))
        along_block = tl.load(along + place, mask=is_seen, other=0.0)
        exponents = project_transposed(q_block, w_block, S.is_precise) + shift[:, None]
        weights = tl.exp2(exponents - log_total[None, :])
        du_block += multiply(weights, dout_block, dout.pointer.dtype.element_ty, S.is_precise)
        d_block -= tl.sum(weights * along_block[None, :], axis=1)
    first = (part * (tl.num_programs(0) // blocks) + head).to(tl.int64) * S.R
    tl.store(d + first + features, d_block, mask=features < S.R)
    store_matrix(du, first, features, S.R, S.BC, S.C, du_block)


@triton.jit(do_not_specialize=["length"])
def key_gradients(k, v, mask, w, log_sums, du, d, dk, dv, num_heads, length, S: tl.constexpr):
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
    dexponent = tl.full([S.BL], 0.0, tl.float32)
    for start in range(0, S.R, S.BR):
        features = start + tl.arange(0, S.BR)
        first = head.to(tl.int64) * S.R
        w_block = load_matrix(w, 0, features, S.R, S.BK, S.K)
        du_block = load_matrix(du, first, features, S.R, S.BC, S.C)
        is_inside = features < S.R
        log_sum = tl.load(log_sums + first + features, mask=is_inside, other=float("inf"))
        d_block = tl.load(d + first + features, mask=is_inside, other=0.0)
        exponents = project(k_block, w_block, S.is_precise)
        weights = tl.exp2(exponents - half_squares[:, None] - log_sum[None, :])
        dv_block += multiply(weights, du_block, dtype, S.is_precise)
        dweights = multiply(v_block, tl.trans(du_block), dtype, S.is_precise)
        dexponents = weights * (dweights + d_block[None, :])
        dk_block += multiply(dexponents, w_block, dtype, S.is_precise)
        dexponent += tl.sum(dexponents, axis=1)
    dk_block = dk_block * _LN_2 - k_block.to(tl.float32) * dexponent[:, None] / S.K**0.5
    store_rows(dk, head, num_heads, positions, length, S.BK, S.K, dk_block)
    store_rows(dv, head, num_heads, positions, length, S.BC, S.C, dv_block)
