"""Triton kernels of the gradients of causal linear attention; formulas are in `causal_kernels`."""

# The sizes S are a `Sizes` within kernels.
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false

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
from protlm.attention.linearized.fused.causal_kernels import (
    LARGEST_RISE,
    load_bias,
    load_references,
    load_state,
    load_terms,
    relu,
    state_row,
)
from protlm.attention.linearized.fused.softmax_kernels import half_square

_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["length"])
def query_gradients(
    q, k, v, mask, w, bias, epsilon, s, z, references, out, totals, directs, dout, dq, along,
    num_heads, length, S: tl.constexpr,
):  # fmt: skip
    """Computes dq and d of a chunk."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    rows = tl.arange(0, S.BL)
    positions = chunk * S.BL + rows
    is_seen = load_mask(mask, head, num_heads, positions, length)
    q_block = load_rows(q, head, num_heads, positions, is_seen, S.BK, S.K)
    k_block = load_rows(k, head, num_heads, positions, is_seen, S.BK, S.K)
    v_block = load_rows(v, head, num_heads, positions, is_seen, S.BC, S.C)
    out_block = load_rows(out, head, num_heads, positions, is_seen, S.BC, S.C).to(tl.float32)
    dout_block = load_rows(dout, head, num_heads, positions, is_seen, S.BC, S.C)
    place = head.to(tl.int64) * length + positions
    total = tl.load(totals + place, mask=is_seen, other=float("inf"))
    along_block = -tl.sum(out_block * dout_block.to(tl.float32), axis=1)
    tl.store(along + place, along_block, mask=positions < length)
    dtype: tl.constexpr = out.pointer.dtype.element_ty
    dweights = multiply(dout_block, tl.trans(v_block), dtype, S.precision)
    is_visible = (rows[:, None] >= rows[None, :]) & is_seen[None, :]
    dweights = tl.where(is_visible, dweights + along_block[:, None], 0.0)
    dq_block = tl.full([S.BL, S.BK], 0.0, tl.float32)
    if bias is not None:
        half_squares = half_square(k_block, S.K)
        first_direct = tl.load(directs + head.to(tl.int64) * tl.num_programs(1) + chunk)
        is_direct = rows >= first_direct
        if first_direct < S.BL:
            for feature in range(0, S.R):
                query, key, row = load_terms(q_block, k_block, half_squares, w, bias, feature, S)
                terms = query[:, None] + key[None, :] - total[:, None]
                terms = tl.where(is_visible & is_direct[:, None], terms, float("-inf"))
                dterms = tl.sum(tl.exp2(terms) * dweights, axis=1)
                dq_block += dterms[:, None] * row[None, :]
        dweights = tl.where(is_direct[:, None], 0.0, dweights)
    for start in range(0, S.R, S.BR):
        features = start + tl.arange(0, S.BR)
        w_block = load_matrix(w, 0, features, S.R, S.BK, S.K)
        s_block = load_matrix(s, state_row(head, chunk, length, S), features, S.R, S.BC, S.C)
        z_block = load_state(z, head, chunk, length, features, S)
        projected_q = project(q_block, w_block, S.precision)
        projected_k = project(k_block, w_block, S.precision)
        dphi = multiply(dout_block, tl.trans(s_block), dtype, S.precision)
        dphi += along_block[:, None] * z_block[None, :]
        if bias is None:
            phi_k = relu(projected_k, epsilon, is_seen[:, None])
            slope = tl.where(projected_q > 0, 1.0, 0.0) / total[:, None]
        else:
            reference = load_references(references, head, chunk, length, features, S)
            exponents = projected_k - half_squares[:, None] - reference[None, :]
            exponents = tl.where(is_seen[:, None], exponents, float("-inf"))
            phi_k = tl.exp2(tl.minimum(exponents, LARGEST_RISE))
            exponents = projected_q + (load_bias(bias, features, S) + reference)[None, :]
            slope = tl.exp2(exponents - total[:, None])
        dphi += multiply(dweights, phi_k, dtype, S.precision)
        dq_block += multiply(dphi * slope, w_block, dtype, S.precision)
    if bias is not None:
        dq_block *= _LN_2
    store_rows(dq, head, num_heads, positions, length, S.BK, S.K, dq_block)


@triton.jit(do_not_specialize=["length"])
def sum_queries(
    q, mask, w, bias, epsilon, references, totals, dout, along, ds, dz, num_heads, length,
    S: tl.constexpr,
):  # fmt: skip
    """Computes dS and dz of a block of features after each chunk."""
    blocks: tl.constexpr = tl.cdiv(S.R, S.BR)
    head = tl.program_id(0) // blocks
    features = tl.program_id(0) % blocks * S.BR + tl.arange(0, S.BR)
    w_block = load_matrix(w, 0, features, S.R, S.BK, S.K)
    ds_block = tl.full([S.BR, S.BC], 0.0, tl.float32)
    dz_block = tl.full([S.BR], 0.0, tl.float32)
    num_chunks = tl.cdiv(length, S.BL)
    if bias is not None:
        bias_block = load_bias(bias, features, S)
        after = load_references(references, head, num_chunks, length, features, S)
    for step in range(0, num_chunks):
        chunk = num_chunks - 1 - step
        positions = chunk * S.BL + tl.arange(0, S.BL)
        is_seen = load_mask(mask, head, num_heads, positions, length)
        q_block = load_rows(q, head, num_heads, positions, is_seen, S.BK, S.K)
        dout_block = load_rows(dout, head, num_heads, positions, is_seen, S.BC, S.C)
        place = head.to(tl.int64) * length + positions
        total = tl.load(totals + place, mask=is_seen, other=float("inf"))
        along_block = tl.load(along + place, mask=is_seen, other=0.0)
        first = state_row(head, chunk, length, S)
        store_matrix(ds, first, features, S.R, S.BC, S.C, ds_block)
        tl.store(dz + first + features, dz_block, mask=features < S.R)
        projected = project_transposed(q_block, w_block, S.precision)
        if bias is None:
            weights = (tl.maximum(projected, 0.0) + epsilon) / total[None, :]
        else:
            before = load_references(references, head, chunk, length, features, S)
            factor = tl.exp2(before - after)
            ds_block, dz_block = ds_block * factor[:, None], dz_block * factor
            weights = tl.exp2(projected + (bias_block + before)[:, None] - total[None, :])
            after = before
        ds_block += multiply(weights, dout_block, dout.pointer.dtype.element_ty, S.precision)
        dz_block += tl.sum(weights * along_block[None, :], axis=1)


@triton.jit(do_not_specialize=["length"])
def key_gradients(
    q, k, v, mask, w, bias, epsilon, references, totals, directs, dout, along, ds, dz, dk, dv,
    num_heads, length, S: tl.constexpr,
):  # fmt: skip
    """Computes dk and dv of a chunk; matrices of weights have a row for each key."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    rows = tl.arange(0, S.BL)
    positions = chunk * S.BL + rows
    is_seen = load_mask(mask, head, num_heads, positions, length)
    q_block = load_rows(q, head, num_heads, positions, is_seen, S.BK, S.K)
    k_block = load_rows(k, head, num_heads, positions, is_seen, S.BK, S.K)
    v_block = load_rows(v, head, num_heads, positions, is_seen, S.BC, S.C)
    dout_block = load_rows(dout, head, num_heads, positions, is_seen, S.BC, S.C)
    place = head.to(tl.int64) * length + positions
    total = tl.load(totals + place, mask=is_seen, other=float("inf"))
    along_block = tl.load(along + place, mask=is_seen, other=0.0)
    dtype: tl.constexpr = v.pointer.dtype.element_ty
    dweights = multiply(v_block, tl.trans(dout_block), dtype, S.precision)
    is_visible = (rows[:, None] <= rows[None, :]) & is_seen[:, None]
    dweights = tl.where(is_visible, dweights + along_block[None, :], 0.0)
    weights = tl.full([S.BL, S.BL], 0.0, tl.float32)
    dk_block = tl.full([S.BL, S.BK], 0.0, tl.float32)
    dv_block = tl.full([S.BL, S.BC], 0.0, tl.float32)
    if bias is not None:
        dexponent = tl.full([S.BL], 0.0, tl.float32)
        half_squares = half_square(k_block, S.K)
        first_direct = tl.load(directs + head.to(tl.int64) * tl.num_programs(1) + chunk)
        is_direct = rows >= first_direct
        if first_direct < S.BL:
            direct = tl.full([S.BL, S.BL], 0.0, tl.float32)
            for feature in range(0, S.R):
                query, key, row = load_terms(q_block, k_block, half_squares, w, bias, feature, S)
                terms = key[:, None] + (query - total)[None, :]
                terms = tl.where(is_visible & is_direct[None, :], terms, float("-inf"))
                terms = tl.exp2(terms)
                direct += terms
                dterms = tl.sum(terms * dweights, axis=1)
                dk_block += dterms[:, None] * row[None, :]
                dexponent += dterms
            dv_block += multiply(direct, dout_block, dtype, S.precision)
        dweights = tl.where(is_direct[None, :], 0.0, dweights)
        is_visible = is_visible & (rows < first_direct)[None, :]
    for start in range(0, S.R, S.BR):
        features = start + tl.arange(0, S.BR)
        is_inside = features < S.R
        w_block = load_matrix(w, 0, features, S.R, S.BK, S.K)
        ds_block = load_matrix(ds, state_row(head, chunk, length, S), features, S.R, S.BC, S.C)
        dz_block = load_state(dz, head, chunk, length, features, S)
        projected_q = project_transposed(q_block, w_block, S.precision)
        projected_k = project(k_block, w_block, S.precision)
        dphi = multiply(v_block, tl.trans(ds_block), dtype, S.precision) + dz_block[None, :]
        if bias is None:
            phi_k = relu(projected_k, epsilon, is_seen[:, None] & is_inside[None, :])
            phi_after = phi_k
            phi_q = (tl.maximum(projected_q, 0.0) + epsilon) / total[None, :]
        else:
            before = load_references(references, head, chunk, length, features, S)
            after = load_references(references, head, chunk + 1, length, features, S)
            exponents = projected_k - half_squares[:, None]
            exponents = tl.where(is_seen[:, None], exponents, float("-inf"))
            phi_k = tl.exp2(tl.minimum(exponents - before[None, :], LARGEST_RISE))
            phi_after = tl.exp2(exponents - after[None, :])
            exponents = projected_q + (load_bias(bias, features, S) + before)[:, None]
            phi_q = tl.exp2(exponents - total[None, :])
        weights += multiply(phi_k, phi_q, dtype, S.precision)
        dv_block += multiply(phi_after, ds_block, dtype, S.precision)
        within = multiply(dweights, tl.trans(phi_q), dtype, S.precision)
        if bias is None:
            dphi = tl.where(projected_k > 0, dphi + within, 0.0)
        else:
            dphi = dphi * phi_after + within * phi_k
            dexponent += tl.sum(dphi, axis=1)
        dk_block += multiply(dphi, w_block, dtype, S.precision)
    dv_block += multiply(tl.where(is_visible, weights, 0.0), dout_block, dtype, S.precision)
    if bias is not None:
        dk_block = dk_block * _LN_2 - k_block.to(tl.float32) * dexponent[:, None] / S.K**0.5
    store_rows(dk, head, num_heads, positions, length, S.BK, S.K, dk_block)
    store_rows(dv, head, num_heads, positions, length, S.BC, S.C, dv_block)
