"""Triton kernels of causal linear attention with ReLU or positive features, and their gradients.

With features of queries and of keys, φq and φk, the output is, in chunks,

    S_r = Σ_j φk_r(j) v_j,  z_r = Σ_j φk_r(j)       over the keys before the chunk: its state
    A_ij = Σ_r φq_r(i) φk_r(j)                      for j ≤ i within the chunk
    O_i = (Σ_r φq_r(i) S_r + Σ_j A_ij v_j) / D_i,   D_i = Σ_r φq_r(i) z_r + Σ_j A_ij

and with p_r(i) = φq_r(i) / D_i, d_i = -dO_i·O_i and dA_ij = dO_i·v_j + d_i the gradients are

    dS_r = Σ_i p_r(i) dO_i,  dz_r = Σ_i p_r(i) d_i  over the queries after the chunk
    D_i dφq_r(i) = dO_i·S_r + d_i z_r + Σ_j dA_ij φk_r(j)
    dφk_r(j) = v_j·dS_r + dz_r + Σ_i dA_ij p_r(i)
    dv_j = Σ_r φk_r(j) dS_r + Σ_i A_ij dO_i / D_i

Features are relu(w_r·x) + ε, or, where constants c are given, powers of 2 with the exponents

    a_ir = w_r·q_i + c_r + M_r,   b_jr = w_r·k_j - |k_j|² log₂e / (2√K) - M_r

relative to a reference M_r, as in `linearized.operands`: the exponent of the first key,
without M_r. b_jr is cut at 64, so that products are finite.

States are stored chunk by chunk: (B, H, chunks, R, C) and (B, H, chunks, R). Products with values
are in the dtype of the values, and their sums in float32, as is all else. Programs are numbered as
in `bidirectional_kernels`, with chunks as positions.
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
    project_split,
    project_transposed,
    store_matrix,
    store_rows,
)

_LARGEST_RISE = tl.constexpr(64.0)


@triton.jit
def state_row(head, chunk, length, S: tl.constexpr):
    """Returns the row of the first feature of a chunk in the states."""
    return (head.to(tl.int64) * tl.cdiv(length, S.BL) + chunk) * S.R


@triton.jit
def key_features(
    k_block, w_block, bias, epsilon, references, head, is_seen, features, S: tl.constexpr
):  # fmt: skip
    """Returns φk, with a row for each key."""
    phi = project_split(k_block, w_block, S.is_precise)
    if bias is None:
        is_seen = is_seen[:, None] & (features < S.R)[None, :]
        phi = tl.maximum(phi, 0.0) + epsilon
    else:
        is_seen = is_seen[:, None]
        reference = load_numbers(references, head.to(tl.int64) * S.R, features, 0.0, S)
        exponents = phi - half_square(k_block, S.K)[:, None] - reference[None, :]
        phi = tl.exp2(tl.minimum(exponents, _LARGEST_RISE))
    return tl.where(is_seen, phi, 0.0)


@triton.jit(do_not_specialize=["length"])
def sum_keys(
    k, v, mask, w, bias, epsilon, references, s, z, num_heads, length, S: tl.constexpr
):  # fmt: skip
    """Computes S and z of a block of features before each chunk."""
    blocks: tl.constexpr = tl.cdiv(S.R, S.BR)
    head = tl.program_id(0) // blocks
    features = tl.program_id(0) % blocks * S.BR + tl.arange(0, S.BR)
    w_block = load_matrix(w, 0, features, S.R, S.BK, S.K)
    if bias is not None:
        reference = load_numbers(references, head.to(tl.int64) * S.R, features, 0.0, S)
    s_block = tl.full([S.BR, S.BC], 0.0, tl.float32)
    z_block = tl.full([S.BR], 0.0, tl.float32)
    for chunk in range(0, tl.cdiv(length, S.BL)):
        positions = chunk * S.BL + tl.arange(0, S.BL)
        is_seen = load_mask(mask, head, num_heads, positions, length)
        k_block = load_rows(k, head, num_heads, positions, is_seen, S.BK, S.K)
        v_block = load_rows(v, head, num_heads, positions, is_seen, S.BC, S.C)
        first = state_row(head, chunk, length, S)
        store_matrix(s, first, features, S.R, S.BC, S.C, s_block)
        tl.store(z + first + features, z_block, mask=features < S.R)
        phi = project_transposed(k_block, w_block, S.is_precise)
        if bias is None:
            phi = tl.maximum(phi, 0.0) + epsilon
        else:
            exponents = phi - half_square(k_block, S.K)[None, :] - reference[:, None]
            phi = tl.exp2(tl.minimum(exponents, _LARGEST_RISE))
        phi = tl.where(is_seen[None, :], phi, 0.0)
        s_block += multiply(phi, v_block, v.pointer.dtype.element_ty, S.is_precise)
        z_block += tl.sum(phi, axis=1)


@triton.jit(do_not_specialize=["length"])
def attend(
    q, k, v, mask, w, bias, epsilon, references, s, z, out, totals, num_heads, length,
    S: tl.constexpr,
):  # fmt: skip
    """Computes O of a chunk, and D, or log₂ D with exponents."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    rows = tl.arange(0, S.BL)
    positions = chunk * S.BL + rows
    is_seen = load_mask(mask, head, num_heads, positions, length)
    q_block = load_rows(q, head, num_heads, positions, is_seen, S.BK, S.K)
    k_block = load_rows(k, head, num_heads, positions, is_seen, S.BK, S.K)
    dtype: tl.constexpr = out.pointer.dtype.element_ty
    total = tl.full([S.BL], 0.0, tl.float32)
    sums = tl.full([S.BL, S.BC], 0.0, tl.float32)
    weights = tl.full([S.BL, S.BL], 0.0, tl.float32)
    highest = tl.full([S.BL], float("-inf"), tl.float32)
    for start in range(0, S.R, S.BR):
        features = start + tl.arange(0, S.BR)
        w_block = load_matrix(w, 0, features, S.R, S.BK, S.K)
        first = state_row(head, chunk, length, S)
        s_block = load_matrix(s, first, features, S.R, S.BC, S.C)
        z_block = load_numbers(z, first, features, 0.0, S)
        phi_k = key_features(
            k_block, w_block, bias, epsilon, references, head, is_seen, features, S
        )
        projected = project_split(q_block, w_block, S.is_precise)
        if bias is None:
            phi_q = tl.maximum(projected, 0.0) + epsilon
        else:
            exponents = projected + load_shift(bias, references, head, features, S)[None, :]
            raised = tl.maximum(highest, tl.max(exponents, axis=1))
            phi_q = tl.exp2(exponents - raised[:, None])
            factor = tl.exp2(highest - raised)
            total *= factor
            sums, weights = sums * factor[:, None], weights * factor[:, None]
            highest = raised
        total += tl.sum(phi_q * z_block[None, :], axis=1)
        sums += multiply(phi_q, s_block, dtype, S.is_precise)
        weights += multiply(phi_q, tl.trans(phi_k), dtype, S.is_precise)
    weights = tl.where(rows[:, None] >= rows[None, :], weights, 0.0)
    v_block = load_rows(v, head, num_heads, positions, is_seen, S.BC, S.C)
    total += tl.sum(weights, axis=1)
    sums += multiply(weights, v_block, dtype, S.is_precise)
    # Without keys, or without ε, a query may have no weight.
    total = tl.where(is_seen & (total > 0), total, float("inf"))
    store_rows(out, head, num_heads, positions, length, S.BC, S.C, sums / total[:, None])
    if bias is not None:
        total = highest + tl.log2(total)
    place = head.to(tl.int64) * length
    tl.store(totals + place + positions, total, mask=positions < length)


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
