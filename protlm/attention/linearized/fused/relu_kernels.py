"""Triton kernels of bidirectional linear attention with ReLU features, and their gradients.

With the features f_r(x) = relu(w_r·x) + ε (arXiv 2009.14794, A.4) the output is

    S_r = Σ_j f_r(k_j) v_j,   z_r = Σ_j f_r(k_j)
    O_i = Σ_r f_r(q_i) S_r / D_i,   D_i = Σ_r f_r(q_i) z_r

and with dN_i = dO_i / D_i and dD_i = -dN_i·O_i the gradients are

    df_r(q_i) = dN_i·S_r + dD_i z_r,      dS_r = Σ_i f_r(q_i) dN_i,   dz_r = Σ_i f_r(q_i) dD_i
    df_r(k_j) = v_j·dS_r + dz_r,          dv_j = Σ_r f_r(k_j) dS_r

Products with values are in the dtype of the values, and their sums in float32, as is all else.
Programs are numbered as in `softmax_kernels`.
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


@triton.jit(do_not_specialize=["length", "part_length"])
def sum_keys(k, v, mask, w, epsilon, s, z, num_heads, length, part_length, S: tl.constexpr):
    """Computes S and z of a block of features over a part of the keys."""
    blocks: tl.constexpr = tl.cdiv(S.R, S.BR)
    head, part = tl.program_id(0) // blocks, tl.program_id(1)
    features = tl.program_id(0) % blocks * S.BR + tl.arange(0, S.BR)
    w_block = load_matrix(w, 0, features, S.R, S.BK, S.K)
    s_block = tl.full([S.BR, S.BC], 0.0, tl.float32)
    z_block = tl.full([S.BR], 0.0, tl.float32)
    end = tl.minimum((part + 1) * part_length, length)
    for start in range(part * part_length, end, S.BL):
        positions = start + tl.arange(0, S.BL)
        is_seen = load_mask(mask, head, num_heads, positions, length)
        k_block = load_rows(k, head, num_heads, positions, is_seen, S.BK, S.K)
        v_block = load_rows(v, head, num_heads, positions, is_seen, S.BC, S.C)
        projected = project_transposed(k_block, w_block, S.is_precise)
        phi = tl.where(is_seen[None, :], tl.maximum(projected, 0.0) + epsilon, 0.0)
        s_block += multiply(phi, v_block, v.pointer.dtype.element_ty, S.is_precise)
        z_block += tl.sum(phi, axis=1)
    first = (part * (tl.num_programs(0) // blocks) + head).to(tl.int64) * S.R
    tl.store(z + first + features, z_block, mask=features < S.R)
    store_matrix(s, first, features, S.R, S.BC, S.C, s_block)


@triton.jit(do_not_specialize=["length"])
def divide_sums(q, mask, w, epsilon, s, z, out, totals, num_heads, length, S: tl.constexpr):
    """Computes O and D of a block of queries."""
    head = tl.program_id(0)
    positions = tl.program_id(1) * S.BL + tl.arange(0, S.BL)
    is_seen = load_mask(mask, head, num_heads, positions, length)
    q_block = load_rows(q, head, num_heads, positions, is_seen, S.BK, S.K)
    total = tl.full([S.BL], 0.0, tl.float32)
    sums = tl.full([S.BL, S.BC], 0.0, tl.float32)
    for start in range(0, S.R, S.BR):
        features = start + tl.arange(0, S.BR)
        first = head.to(tl.int64) * S.R
        w_block = load_matrix(w, 0, features, S.R, S.BK, S.K)
        s_block = load_matrix(s, first, features, S.R, S.BC, S.C)
        z_block = tl.load(z + first + features, mask=features < S.R, other=0.0)
        phi = tl.maximum(project(q_block, w_block, S.is_precise), 0.0) + epsilon
        sums += multiply(phi, s_block, out.pointer.dtype.element_ty, S.is_precise)
        total += tl.sum(phi * z_block[None, :], axis=1)
    # Without keys, or without ε, a query may have no weight.
    has_weight = is_seen & (total > 0)
    total = tl.where(has_weight, total, float("inf"))
    store_rows(out, head, num_heads, positions, length, S.BC, S.C, sums / total[:, None])
    first = head.to(tl.int64) * length
    tl.store(totals + first + positions, total, mask=positions < length)


@triton.jit(do_not_specialize=["length"])
def query_gradients(
    q, mask, w, s, z, out, totals, dout, dq, dtotals, num_heads, length, S: tl.constexpr
):
    """Computes dq and dD of a block of queries."""
    head = tl.program_id(0)
    positions = tl.program_id(1) * S.BL + tl.arange(0, S.BL)
    is_seen = load_mask(mask, head, num_heads, positions, length)
    q_block = load_rows(q, head, num_heads, positions, is_seen, S.BK, S.K)
    out_block = load_rows(out, head, num_heads, positions, is_seen, S.BC, S.C).to(tl.float32)
    dout_block = load_rows(dout, head, num_heads, positions, is_seen, S.BC, S.C)
    place = head.to(tl.int64) * length + positions
    total = tl.load(totals + place, mask=is_seen, other=float("inf"))
    along = tl.sum(out_block * dout_block.to(tl.float32), axis=1)
    tl.store(dtotals + place, -along / total, mask=positions < length)
    dtype: tl.constexpr = out.pointer.dtype.element_ty
    dq_block = tl.full([S.BL, S.BK], 0.0, tl.float32)
    for start in range(0, S.R, S.BR):
        features = start + tl.arange(0, S.BR)
        first = head.to(tl.int64) * S.R
        w_block = load_matrix(w, 0, features, S.R, S.BK, S.K)
        s_block = load_matrix(s, first, features, S.R, S.BC, S.C)
        z_block = tl.load(z + first + features, mask=features < S.R, other=0.0)
        projected = project(q_block, w_block, S.is_precise)
        dphi = multiply(dout_block, tl.trans(s_block), dtype, S.is_precise)
        dphi = (dphi - along[:, None] * z_block[None, :]) / total[:, None]
        dq_block += multiply(tl.where(projected > 0, dphi, 0.0), w_block, dtype, S.is_precise)
    store_rows(dq, head, num_heads, positions, length, S.BK, S.K, dq_block)


@triton.jit(do_not_specialize=["length", "part_length"])
def sum_gradients(
    q, mask, w, epsilon, totals, dout, dtotals, ds, dz, num_heads, length, part_length,
    S: tl.constexpr,
):  # fmt: skip
    """Computes dS and dz of a block of features over a part of the queries."""
    blocks: tl.constexpr = tl.cdiv(S.R, S.BR)
    head, part = tl.program_id(0) // blocks, tl.program_id(1)
    features = tl.program_id(0) % blocks * S.BR + tl.arange(0, S.BR)
    w_block = load_matrix(w, 0, features, S.R, S.BK, S.K)
    ds_block = tl.full([S.BR, S.BC], 0.0, tl.float32)
    dz_block = tl.full([S.BR], 0.0, tl.float32)
    end = tl.minimum((part + 1) * part_length, length)
    for start in range(part * part_length, end, S.BL):
        positions = start + tl.arange(0, S.BL)
        is_seen = load_mask(mask, head, num_heads, positions, length)
        q_block = load_rows(q, head, num_heads, positions, is_seen, S.BK, S.K)
        dout_block = load_rows(dout, head, num_heads, positions, is_seen, S.BC, S.C)
        place = head.to(tl.int64) * length + positions
        total = tl.load(totals + place, mask=is_seen, other=float("inf"))
        dtotal = tl.load(dtotals + place, mask=is_seen, other=0.0)
        phi = tl.maximum(project_transposed(q_block, w_block, S.is_precise), 0.0) + epsilon
        weights = phi / total[None, :]
        ds_block += multiply(weights, dout_block, dout.pointer.dtype.element_ty, S.is_precise)
        dz_block += tl.sum(phi * dtotal[None, :], axis=1)
    first = (part * (tl.num_programs(0) // blocks) + head).to(tl.int64) * S.R
    tl.store(dz + first + features, dz_block, mask=features < S.R)
    store_matrix(ds, first, features, S.R, S.BC, S.C, ds_block)


@triton.jit(do_not_specialize=["length"])
def key_gradients(k, v, mask, w, epsilon, ds, dz, dk, dv, num_heads, length, S: tl.constexpr):
    """Computes dk and dv of a block of keys."""
    head = tl.program_id(0)
    positions = tl.program_id(1) * S.BL + tl.arange(0, S.BL)
    is_seen = load_mask(mask, head, num_heads, positions, length)
    k_block = load_rows(k, head, num_heads, positions, is_seen, S.BK, S.K)
    v_block = load_rows(v, head, num_heads, positions, is_seen, S.BC, S.C)
    dtype: tl.constexpr = v.pointer.dtype.element_ty
    dk_block = tl.full([S.BL, S.BK], 0.0, tl.float32)
    dv_block = tl.full([S.BL, S.BC], 0.0, tl.float32)
    for start in range(0, S.R, S.BR):
        features = start + tl.arange(0, S.BR)
        first = head.to(tl.int64) * S.R
        w_block = load_matrix(w, 0, features, S.R, S.BK, S.K)
        ds_block = load_matrix(ds, first, features, S.R, S.BC, S.C)
        dz_block = tl.load(dz + first + features, mask=features < S.R, other=0.0)
        projected = project(k_block, w_block, S.is_precise)
        phi = tl.where(is_seen[:, None], tl.maximum(projected, 0.0) + epsilon, 0.0)
        dv_block += multiply(phi, ds_block, dtype, S.is_precise)
        dphi = multiply(v_block, tl.trans(ds_block), dtype, S.is_precise) + dz_block[None, :]
        dphi = tl.where(projected > 0, dphi, 0.0)
        dk_block += multiply(dphi, w_block, dtype, S.is_precise)
    store_rows(dk, head, num_heads, positions, length, S.BK, S.K, dk_block)
    store_rows(dv, head, num_heads, positions, length, S.BC, S.C, dv_block)
