"""Triton kernels of the gradients of causal linear attention; formulas are in `causal_kernels`."""

# The sizes S are a `Sizes` within kernels.
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false

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
    project_transposed,
    store_matrix,
    store_rows,
)
from protlm.attention.linearized.fused.causal_kernels import key_features, state_row


@triton.jit
def _query_weights(
    q_block, w_block, bias, epsilon, references, head, total, features, S: tl.constexpr
):  # fmt: skip
    """Returns p, with a row for each query."""
    weights = project_split(q_block, w_block, S.is_precise)
    if bias is None:
        weights = (tl.maximum(weights, 0.0) + epsilon) / total[:, None]
    else:
        shift = load_shift(bias, references, head, features, S)
        weights = tl.exp2(weights + shift[None, :] - total[:, None])
    return weights


@triton.jit(do_not_specialize=["length"])
def query_gradients(
    q, k, v, mask, w, bias, epsilon, references, s, z, out, totals, dout, dq, along, num_heads,
    length, S: tl.constexpr,
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
    dweights = multiply(dout_block, tl.trans(v_block), dtype, S.is_precise) + along_block[:, None]
    dweights = tl.where(rows[:, None] >= rows[None, :], dweights, 0.0)
    dq_block = tl.full([S.BL, S.BK], 0.0, tl.float32)
    for start in range(0, S.R, S.BR):
        features = start + tl.arange(0, S.BR)
        w_block = load_matrix(w, 0, features, S.R, S.BK, S.K)
        first = state_row(head, chunk, length, S)
        s_block = load_matrix(s, first, features, S.R, S.BC, S.C)
        z_block = load_numbers(z, first, features, 0.0, S)
        phi_k = key_features(
            k_block, w_block, bias, epsilon, references, head, is_seen, features, S
        )
        dphi = multiply(dout_block, tl.trans(s_block), dtype, S.is_precise)
        dphi += along_block[:, None] * z_block[None, :]
        dphi += multiply(dweights, phi_k, dtype, S.is_precise)
        projected = project_split(q_block, w_block, S.is_precise)
        if bias is None:
            dphi = tl.where(projected > 0, dphi, 0.0) / total[:, None]
        else:
            shift = load_shift(bias, references, head, features, S)
            dphi *= tl.exp2(projected + shift[None, :] - total[:, None]) * LN_2
        dq_block += multiply(dphi, w_block, dtype, S.is_precise)
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
        shift = load_shift(bias, references, head, features, S)
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
        projected = project_transposed(q_block, w_block, S.is_precise)
        if bias is None:
            weights = (tl.maximum(projected, 0.0) + epsilon) / total[None, :]
        else:
            weights = tl.exp2(projected + shift[:, None] - total[None, :])
        ds_block += multiply(weights, dout_block, dout.pointer.dtype.element_ty, S.is_precise)
        dz_block += tl.sum(weights * along_block[None, :], axis=1)


@triton.jit(do_not_specialize=["length"])
def value_gradients(
    q, k, mask, w, bias, epsilon, references, totals, dout, ds, dv, num_heads, length,
    S: tl.constexpr,
):  # fmt: skip
    """Computes dv of a chunk; the matrix of weights has a row for each key."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    rows = tl.arange(0, S.BL)
    positions = chunk * S.BL + rows
    is_seen = load_mask(mask, head, num_heads, positions, length)
    q_block = load_rows(q, head, num_heads, positions, is_seen, S.BK, S.K)
    k_block = load_rows(k, head, num_heads, positions, is_seen, S.BK, S.K)
    place = head.to(tl.int64) * length + positions
    total = tl.load(totals + place, mask=is_seen, other=float("inf"))
    dtype: tl.constexpr = dv.pointer.dtype.element_ty
    weights = tl.full([S.BL, S.BL], 0.0, tl.float32)
    dv_block = tl.full([S.BL, S.BC], 0.0, tl.float32)
    for start in range(0, S.R, S.BR):
        features = start + tl.arange(0, S.BR)
        w_block = load_matrix(w, 0, features, S.R, S.BK, S.K)
        ds_block = load_matrix(ds, state_row(head, chunk, length, S), features, S.R, S.BC, S.C)
        phi = key_features(k_block, w_block, bias, epsilon, references, head, is_seen, features, S)
        phi_q = _query_weights(
            q_block, w_block, bias, epsilon, references, head, total, features, S
        )
        weights += multiply(phi, tl.trans(phi_q), dtype, S.is_precise)
        dv_block += multiply(phi, ds_block, dtype, S.is_precise)
    weights = tl.where(rows[:, None] <= rows[None, :], weights, 0.0)
    dout_block = load_rows(dout, head, num_heads, positions, is_seen, S.BC, S.C)
    dv_block += multiply(weights, dout_block, dtype, S.is_precise)
    store_rows(dv, head, num_heads, positions, length, S.BC, S.C, dv_block)


@triton.jit(do_not_specialize=["length"])
def key_gradients(
    q, k, v, mask, w, bias, epsilon, references, totals, dout, along, ds, dz, dk, num_heads,
    length, S: tl.constexpr,
):  # fmt: skip
    """Computes dk of a chunk; the matrix of weights has a row for each key."""
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
    dweights = multiply(v_block, tl.trans(dout_block), dtype, S.is_precise) + along_block[None, :]
    dweights = tl.where(rows[:, None] <= rows[None, :], dweights, 0.0)
    dk_block = tl.full([S.BL, S.BK], 0.0, tl.float32)
    dsquare = tl.full([S.BL], 0.0, tl.float32)
    for start in range(0, S.R, S.BR):
        features = start + tl.arange(0, S.BR)
        w_block = load_matrix(w, 0, features, S.R, S.BK, S.K)
        first = state_row(head, chunk, length, S)
        ds_block = load_matrix(ds, first, features, S.R, S.BC, S.C)
        dz_block = load_numbers(dz, first, features, 0.0, S)
        phi_q = _query_weights(
            q_block, w_block, bias, epsilon, references, head, total, features, S
        )
        dphi = multiply(v_block, tl.trans(ds_block), dtype, S.is_precise) + dz_block[None, :]
        dphi += multiply(dweights, phi_q, dtype, S.is_precise)
        phi = key_features(k_block, w_block, bias, epsilon, references, head, is_seen, features, S)
        if bias is None:
            dphi = tl.where(phi > epsilon, dphi, 0.0)
        else:
            dphi *= phi * LN_2
            dsquare += tl.sum(dphi, axis=1)
        dk_block += multiply(dphi, w_block, dtype, S.is_precise)
    if bias is not None:
        # Loaded with another mask, and therefore again: kept, it would take registers in the loop.
        is_seen = is_seen & (positions < length)
        k_block = load_rows(k, head, num_heads, positions, is_seen, S.BK, S.K)
        dk_block -= k_block.to(tl.float32) * (dsquare / (LN_2 * S.K**0.5))[:, None]
    store_rows(dk, head, num_heads, positions, length, S.BK, S.K, dk_block)
