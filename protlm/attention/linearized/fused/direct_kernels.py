"""Triton kernels of direct rows, the few whose features have no common reference.

Symbols are those of `causal_kernels`. The features are taken one after the other, and the largest
exponent of a row is removed from its terms, so that nothing overflows. Programs of chunks without
direct rows end at once. They are separate kernels because others would run out of registers.
"""

# The sizes S are a `Sizes` within kernels.
# pyright: reportAttributeAccessIssue=false

import triton
import triton.language as tl

from protlm.attention.linearized.fused.blocks import load_mask, load_rows, multiply, store_rows
from protlm.attention.linearized.fused.causal_kernels import state_row
from protlm.attention.linearized.fused.softmax_kernels import half_square

_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _load_exponents(q_block, k_block, half_squares, w, bias, feature, S: tl.constexpr):
    """Returns the exponents of one feature for queries and keys, both without M, and its row."""
    columns = tl.arange(0, S.BK)
    row = tl.load(w + feature * S.K + columns, mask=columns < S.K, other=0.0)
    query = tl.sum(q_block.to(tl.float32) * row[None, :], axis=1) + tl.load(bias + feature)
    key = tl.sum(k_block.to(tl.float32) * row[None, :], axis=1) - half_squares
    return query, key, row


@triton.jit
def _add_rows(x, head, num_heads, positions, length, block_width: tl.constexpr, width, block):
    is_inside = positions < length
    before = load_rows(x, head, num_heads, positions, is_inside, block_width, width)
    block += before.to(tl.float32)
    store_rows(x, head, num_heads, positions, length, block_width, width, block)


@triton.jit(do_not_specialize=["length"])
def attend_directly(
    q, k, v, mask, w, bias, s, z, references, out, totals, directs, num_heads, length,
    S: tl.constexpr,
):  # fmt: skip
    """Computes O and log₂ D of the direct rows of a chunk."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    first_direct = tl.load(directs + head.to(tl.int64) * tl.num_programs(1) + chunk)
    if first_direct < S.BL:
        rows, columns = tl.arange(0, S.BL), tl.arange(0, S.BC)
        positions = chunk * S.BL + rows
        is_seen = load_mask(mask, head, num_heads, positions, length)
        q_block = load_rows(q, head, num_heads, positions, is_seen, S.BK, S.K)
        k_block = load_rows(k, head, num_heads, positions, is_seen, S.BK, S.K)
        half_squares = half_square(k_block, S.K)
        is_visible = (rows[:, None] >= rows[None, :]) & is_seen[None, :]
        highest = tl.full([S.BL], float("-inf"), tl.float32)
        total = tl.full([S.BL], 0.0, tl.float32)
        sums = tl.full([S.BL, S.BC], 0.0, tl.float32)
        weights = tl.full([S.BL, S.BL], 0.0, tl.float32)
        first = state_row(head, chunk, length, S)
        for feature in range(0, S.R):
            reference = tl.load(references + first + head.to(tl.int64) * S.R + feature)
            s_row = tl.load(s + (first + feature) * S.C + columns, mask=columns < S.C, other=0.0)
            query, key, _ = _load_exponents(q_block, k_block, half_squares, w, bias, feature, S)
            terms = tl.where(is_visible, query[:, None] + key[None, :], float("-inf"))
            raised = tl.maximum(tl.max(terms, axis=1), query + reference)
            raised = tl.maximum(highest, raised)
            factor = tl.exp2(highest - raised)
            weight = tl.exp2(query + reference - raised)
            weights = weights * factor[:, None] + tl.exp2(terms - raised[:, None])
            total = total * factor + weight * tl.load(z + first + feature)
            sums = sums * factor[:, None] + weight[:, None] * s_row.to(tl.float32)[None, :]
            highest = raised
        v_block = load_rows(v, head, num_heads, positions, is_seen, S.BC, S.C)
        sums += multiply(weights, v_block, out.pointer.dtype.element_ty, S.is_precise)
        total += tl.sum(weights, axis=1)
        is_direct = is_seen & (rows >= first_direct)
        total = tl.where(is_direct, total, 1.0)
        positions = tl.where(is_direct, positions, length)
        store_rows(out, head, num_heads, positions, length, S.BC, S.C, sums / total[:, None])
        place = head.to(tl.int64) * length + positions
        tl.store(totals + place, highest + tl.log2(total), mask=is_direct)


@triton.jit(do_not_specialize=["length"])
def add_direct_gradients(
    q, k, v, mask, w, bias, totals, directs, dout, along, dq, dk, dv, num_heads, length,
    S: tl.constexpr,
):  # fmt: skip
    """Adds the gradients through the weights of direct rows to dq, dk and dv of a chunk."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    first_direct = tl.load(directs + head.to(tl.int64) * tl.num_programs(1) + chunk)
    if first_direct < S.BL:
        rows = tl.arange(0, S.BL)
        positions = chunk * S.BL + rows
        is_seen = load_mask(mask, head, num_heads, positions, length)
        q_block = load_rows(q, head, num_heads, positions, is_seen, S.BK, S.K)
        k_block = load_rows(k, head, num_heads, positions, is_seen, S.BK, S.K)
        v_block = load_rows(v, head, num_heads, positions, is_seen, S.BC, S.C)
        dout_block = load_rows(dout, head, num_heads, positions, is_seen, S.BC, S.C)
        is_direct = is_seen & (rows >= first_direct)
        place = head.to(tl.int64) * length + positions
        total = tl.load(totals + place, mask=is_direct, other=float("inf"))
        along_block = tl.load(along + place, mask=is_direct, other=0.0)
        half_squares = tl.where(is_seen, half_square(k_block, S.K), float("inf"))
        is_visible = rows[:, None] >= rows[None, :]
        dtype: tl.constexpr = v.pointer.dtype.element_ty
        dweights = multiply(dout_block, tl.trans(v_block), dtype, S.is_precise)
        dweights += along_block[:, None]
        weights = tl.full([S.BL, S.BL], 0.0, tl.float32)
        dq_block = tl.full([S.BL, S.BK], 0.0, tl.float32)
        dk_block = tl.full([S.BL, S.BK], 0.0, tl.float32)
        dsquare = tl.full([S.BL], 0.0, tl.float32)
        for feature in range(0, S.R):
            query, key, row = _load_exponents(q_block, k_block, half_squares, w, bias, feature, S)
            terms = (query - total)[:, None] + key[None, :]
            terms = tl.exp2(tl.where(is_visible, terms, float("-inf")))
            weights += terms
            dterms = terms * dweights
            dq_block += tl.sum(dterms, axis=1)[:, None] * row[None, :]
            dkey = tl.sum(dterms, axis=0)
            dk_block += dkey[:, None] * row[None, :]
            dsquare += dkey
        dk_block = dk_block * _LN_2 - k_block.to(tl.float32) * (dsquare / S.K**0.5)[:, None]
        dv_block = multiply(tl.trans(weights), dout_block, dtype, S.is_precise)
        _add_rows(dq, head, num_heads, positions, length, S.BK, S.K, dq_block * _LN_2)
        _add_rows(dk, head, num_heads, positions, length, S.BK, S.K, dk_block)
        _add_rows(dv, head, num_heads, positions, length, S.BC, S.C, dv_block)
