"""Triton kernels that both modes of linear attention have; symbols as in the other two modules.

Those of the sums over keys, S and z, and over queries, dS and dz: a program sums a block of
features over a chunk of the positions of a sample; on axis 0 are the heads of all samples, each
times the blocks of features, on axis 1 the chunks. Where there are `states`, as in causal
attention, it begins with the sums of the chunks before its own (for queries, after it), and stores
the sum before (after) each block of positions. Nothing is subtracted: a sum over earlier keys has
no later ones.

Those of outputs and of dq: a program has a block of positions of one sample, and one of its heads.
If causal, S and z are the states before the block, and the keys of the block are added; the
references of bidirectional exponents are z.

Samples have one length, or are the packed proteins of one row, which begin at `starts`.
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
    load_shift,
    multiply,
    project,
    project_split,
    project_transposed,
    state_row,
    store_matrix,
    store_rows,
    whole_block,
)

# Far below any exponent, and finite, so that differences are not NaN.
_LOWEST = tl.constexpr(-1e30)
_LARGEST_RISE = tl.constexpr(64.0)


@triton.jit
def first_row(number, head, num_heads, R: tl.constexpr):
    """Returns the row of the first feature of a head, in sums or states by number."""
    return (number * num_heads + head).to(tl.int64) * R


@triton.jit
def _add_row(s_block, z_block, s, z, first, features, R: tl.constexpr, BC: tl.constexpr, C):
    return (
        s_block + load_matrix(s, first, features, R, BC, C),
        z_block + load_numbers(z, first, features, 0.0, R),
    )


@triton.jit
def _store_row(s, z, first, features, s_block, z_block, R: tl.constexpr, BC: tl.constexpr, C):
    tl.store(z + first + features, z_block, mask=features < R)
    store_matrix(s, first, features, R, s_block, BC, C)


@triton.jit(do_not_specialize=["length", "chunk_length"])
def sum_keys(
    k, v, mask, starts, w, bias, epsilon, references, s, z, states, state_sums, num_heads, length,
    chunk_length, R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BL: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Computes S and z of a block of features over a chunk of the keys."""
    blocks: tl.constexpr = tl.cdiv(R, BR)
    head, chunk = tl.program_id(0) // blocks, tl.program_id(1)
    all_heads = tl.num_programs(0) // blocks
    features = tl.program_id(0) % blocks * BR + tl.arange(0, BR)
    w_block = load_matrix(w, 0, features, R, BK, K)
    highest = tl.full([BR], _LOWEST, tl.float32)
    s_block = tl.full([BR, BC], 0.0, tl.float32)
    z_block = tl.full([BR], 0.0, tl.float32)
    if references is not None:
        reference = load_numbers(references, head.to(tl.int64) * R, features, 0.0, R)
    if states is not None:
        for before in range(0, chunk):
            first = first_row(before, head, all_heads, R)
            s_block, z_block = _add_row(s_block, z_block, s, z, first, features, R, BC, C)
    sample, own_head = head // num_heads, head % num_heads
    begin, end = sample * length, sample * length + length
    # The states of a sample, and the distance of their rows.
    own_states, state_heads = head, all_heads
    if starts is not None:
        begin, end = tl.load(starts + sample), tl.load(starts + sample + 1)
        if begin == end:
            return
        own_states, state_heads = (begin // BL + sample) * num_heads + own_head, num_heads
    low = begin + chunk * chunk_length
    for start in range(low, tl.minimum(low + chunk_length, end), BL):
        if states is not None:
            first = first_row((start - begin) // BL, own_states, state_heads, R)
            _store_row(states, state_sums, first, features, s_block, z_block, R, BC, C)
        positions = start + tl.arange(0, BL)
        is_seen = load_mask(mask, positions, end)
        k_block = load_rows(k, own_head, num_heads, positions, is_seen, BK, K)
        phi = project_transposed(k_block, w_block, PRECISE)
        v_block = load_rows(v, own_head, num_heads, positions, is_seen, BC, C)
        if bias is None:
            phi = tl.where(is_seen[None, :], tl.maximum(phi, 0.0) + epsilon, 0.0)
        elif references is not None:
            exponents = phi - half_square(k_block, K)[None, :] - reference[:, None]
            phi = tl.exp2(tl.minimum(exponents, _LARGEST_RISE))
            phi = tl.where(is_seen[None, :], phi, 0.0)
        else:
            exponents = phi - half_square(k_block, K)[None, :]
            exponents = tl.where(is_seen[None, :], exponents, float("-inf"))
            raised = tl.maximum(highest, tl.max(exponents, axis=1))
            phi = tl.exp2(exponents - raised[:, None])
            factor = tl.exp2(highest - raised)
            s_block, z_block = s_block * factor[:, None], z_block * factor
            highest = raised
        s_block += multiply(phi, v_block, v.dtype.element_ty, PRECISE)
        z_block += tl.sum(phi, axis=1)
    if states is None:
        if bias is not None and references is None:
            # A chunk may be all padding.
            has_keys = z_block > 0
            total = tl.where(has_keys, z_block, 1.0)
            s_block = s_block / total[:, None]
            z_block = tl.where(has_keys, highest + tl.log2(total), _LOWEST)
        first = first_row(chunk, head, all_heads, R)
        _store_row(s, z, first, features, s_block, z_block, R, BC, C)


@triton.jit(do_not_specialize=["length", "chunk_length"])
def sum_queries(
    q, mask, starts, w, bias, epsilon, references, totals, dout, along, s, z, states, state_sums,
    num_heads, length, chunk_length, R: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    BL: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Computes dS and dz of a block of features over a chunk of the queries."""
    blocks: tl.constexpr = tl.cdiv(R, BR)
    head, chunk = tl.program_id(0) // blocks, tl.program_id(1)
    all_heads = tl.num_programs(0) // blocks
    features = tl.program_id(0) % blocks * BR + tl.arange(0, BR)
    w_block = load_matrix(w, 0, features, R, BK, K)
    s_block = tl.full([BR, BC], 0.0, tl.float32)
    z_block = tl.full([BR], 0.0, tl.float32)
    if bias is not None:
        shift = load_shift(bias, references, head, features, R)
    if states is not None:
        for after in range(chunk + 1, tl.num_programs(1)):
            first = first_row(after, head, all_heads, R)
            s_block, z_block = _add_row(s_block, z_block, s, z, first, features, R, BC, C)
    sample, own_head = head // num_heads, head % num_heads
    begin, end = sample * length, sample * length + length
    own_states, state_heads = head, all_heads
    if starts is not None:
        begin, end = tl.load(starts + sample), tl.load(starts + sample + 1)
        if begin == end:
            return
        own_states, state_heads = (begin // BL + sample) * num_heads + own_head, num_heads
    low = begin + chunk * chunk_length
    high = tl.minimum(low + chunk_length, end)
    for step in range(low, high, BL):
        start = step
        if states is not None:
            start = 2 * low + (tl.cdiv(high - low, BL) - 1) * BL - step
            first = first_row((start - begin) // BL, own_states, state_heads, R)
            _store_row(states, state_sums, first, features, s_block, z_block, R, BC, C)
        positions = start + tl.arange(0, BL)
        is_seen = load_mask(mask, positions, end)
        q_block = load_rows(q, own_head, num_heads, positions, is_seen, BK, K)
        phi = project_transposed(q_block, w_block, PRECISE)
        dout_block = load_rows(dout, own_head, num_heads, positions, is_seen, BC, C)
        place = positions.to(tl.int64) * num_heads + own_head
        total = tl.load(totals + place, mask=is_seen, other=float("inf"))
        along_block = tl.load(along + place, mask=is_seen, other=0.0)
        if bias is None:
            phi = tl.maximum(phi, 0.0) + epsilon
            weights, along_block = phi / total[None, :], along_block / total
        else:
            phi = tl.exp2(phi + shift[:, None] - total[None, :])
            weights = phi
        s_block += multiply(weights, dout_block, dout.dtype.element_ty, PRECISE)
        z_block += tl.sum(phi * along_block[None, :], axis=1)
    if states is None:
        first = first_row(chunk, head, all_heads, R)
        _store_row(s, z, first, features, s_block, z_block, R, BC, C)


@triton.jit
def key_features(
    k_block, w_block, bias, epsilon, references, head, is_seen, features,
    R: tl.constexpr, K: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Returns φk, with a row for each key."""
    phi = project_split(k_block, w_block, PRECISE)
    if bias is None:
        is_seen = is_seen[:, None] & (features < R)[None, :]
        phi = tl.maximum(phi, 0.0) + epsilon
    else:
        is_seen = is_seen[:, None]
        reference = load_numbers(references, head.to(tl.int64) * R, features, 0.0, R)
        exponents = phi - half_square(k_block, K)[:, None] - reference[None, :]
        phi = tl.exp2(tl.minimum(exponents, _LARGEST_RISE))
    return tl.where(is_seen, phi, 0.0)


@triton.jit(do_not_specialize=["length"])
def attend(
    q, k, v, mask, blocks, w, bias, epsilon, references, s, z, out, totals, num_heads,
    length, R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BL: tl.constexpr, BR: tl.constexpr,
    BK: tl.constexpr, BC: tl.constexpr, PRECISE: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Computes O, and D or its logarithm, of a block of queries."""
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
    dtype: tl.constexpr = out.dtype.element_ty
    highest = tl.full([BL], float("-inf"), tl.float32)
    total = tl.full([BL], 0.0, tl.float32)
    sums = tl.full([BL, BC], 0.0, tl.float32)
    if CAUSAL:
        k_block = load_rows(k, own_head, num_heads, positions, is_seen, BK, K)
        weights = tl.full([BL, BL], 0.0, tl.float32)
    for start in range(0, R, BR):
        features = start + tl.arange(0, BR)
        w_block = load_matrix(w, 0, features, R, BK, K)
        first = state_row(R) if CAUSAL else head.to(tl.int64) * R
        s_block = load_matrix(s, first, features, R, BC, C)
        if CAUSAL:
            phi_k = key_features(
                k_block, w_block, bias, epsilon, references, head, is_seen, features, R, K, PRECISE
            )
            projected = project_split(q_block, w_block, PRECISE)
        else:
            projected = project(q_block, w_block, PRECISE)
        if bias is None:
            phi = tl.maximum(projected, 0.0) + epsilon
        else:
            exponents = projected + load_shift(bias, references, head, features, R)[None, :]
            raised = tl.maximum(highest, tl.max(exponents, axis=1))
            phi = tl.exp2(exponents - raised[:, None])
            factor = tl.exp2(highest - raised)
            total, sums = total * factor, sums * factor[:, None]
            if CAUSAL:
                weights *= factor[:, None]
            highest = raised
        # Bidirectional exponents have z already.
        if CAUSAL or bias is None:
            z_block = load_numbers(z, first, features, 0.0, R)
            total += tl.sum(phi * z_block[None, :], axis=1)
        else:
            total += tl.sum(phi, axis=1)
        sums += multiply(phi, s_block, dtype, PRECISE)
        if CAUSAL:
            weights += multiply(phi, tl.trans(phi_k), dtype, PRECISE)
    if CAUSAL:
        weights = tl.where(rows[:, None] >= rows[None, :], weights, 0.0)
        v_block = load_rows(v, own_head, num_heads, positions, is_seen, BC, C)
        total += tl.sum(weights, axis=1)
        sums += multiply(weights, v_block, dtype, PRECISE)
    # Without keys, or without ε, a query may have no weight.
    total = tl.where(is_seen & (total > 0), total, float("inf"))
    store_rows(out, own_head, num_heads, positions, end, sums / total[:, None], BC, C)
    if bias is not None:
        total = highest + tl.log2(total)
    place = positions.to(tl.int64) * num_heads + own_head
    tl.store(totals + place, total, mask=positions < end)


@triton.jit(do_not_specialize=["length"])
def query_gradients(
    q, k, v, mask, blocks, w, bias, epsilon, references, s, z, out, totals, dout, dq,
    along, num_heads, length, R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BL: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, PRECISE: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Computes dq and d of a block of queries."""
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
    out_block = load_rows(out, own_head, num_heads, positions, is_seen, BC, C).to(tl.float32)
    dout_block = load_rows(dout, own_head, num_heads, positions, is_seen, BC, C)
    place = positions * num_heads + own_head
    total = tl.load(totals + place, mask=is_seen, other=float("inf"))
    along_block = -tl.sum(out_block * dout_block.to(tl.float32), axis=1)
    tl.store(along + place, along_block, mask=positions < end)
    dtype: tl.constexpr = out.dtype.element_ty
    dq_block = tl.full([BL, BK], 0.0, tl.float32)
    if CAUSAL:
        k_block = load_rows(k, own_head, num_heads, positions, is_seen, BK, K)
        v_block = load_rows(v, own_head, num_heads, positions, is_seen, BC, C)
        dweights = multiply(dout_block, tl.trans(v_block), dtype, PRECISE) + along_block[:, None]
        dweights = tl.where(rows[:, None] >= rows[None, :], dweights, 0.0)
    for start in range(0, R, BR):
        features = start + tl.arange(0, BR)
        w_block = load_matrix(w, 0, features, R, BK, K)
        first = state_row(R) if CAUSAL else head.to(tl.int64) * R
        s_block = load_matrix(s, first, features, R, BC, C)
        if not CAUSAL:
            projected = project(q_block, w_block, PRECISE)
        dphi = multiply(dout_block, tl.trans(s_block), dtype, PRECISE)
        if CAUSAL or bias is None:
            dphi += along_block[:, None] * load_numbers(z, first, features, 0.0, R)[None, :]
        else:
            dphi += along_block[:, None]
        if CAUSAL:
            phi_k = key_features(
                k_block, w_block, bias, epsilon, references, head, is_seen, features, R, K, PRECISE
            )
            dphi += multiply(dweights, phi_k, dtype, PRECISE)
            projected = project_split(q_block, w_block, PRECISE)
        if bias is None:
            dphi = tl.where(projected > 0, dphi, 0.0) / total[:, None]
        else:
            shift = load_shift(bias, references, head, features, R)
            dphi *= tl.exp2(projected + shift[None, :] - total[:, None])
        dq_block += multiply(dphi, w_block, dtype, PRECISE)
    if bias is not None:
        dq_block *= LN_2
    if blocks is not None:
        # Loaded again: kept, it would take a register in the loop.
        end = tl.load(blocks + 3 * tl.program_id(1) + 2)
    store_rows(dq, own_head, num_heads, positions, end, dq_block, BK, K)
