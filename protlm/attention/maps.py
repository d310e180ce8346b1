"""Attention maps in blocks of rows, for proteins whose L×L map does not fit in memory."""

from collections.abc import Iterator

from torch import Tensor

from protlm.attention.base import Attention


def attention_rows(
    mechanism: Attention,
    q_BHLK: Tensor,
    k_BHLK: Tensor,
    *,
    hidden_BLD: Tensor,
    mask_BL: Tensor,
    causal: bool,
    block: int = 256,
) -> Iterator[tuple[slice, Tensor]]:
    """Yields the map of a mechanism in blocks of rows (BHML), from first to last.

    Args:
        mechanism: the mechanism.
        q_BHLK: queries as `forward` takes them.
        k_BHLK: keys, likewise.
        hidden_BLD: the normalized input of the block, likewise.
        mask_BL: true at residues and special tokens.
        causal: whether position i sees only positions up to and including i.
        block: the number of rows in a block; memory is B × H × block × L.
    """
    length = q_BHLK.shape[2]
    for start in range(0, length, block):
        rows = slice(start, min(start + block, length))
        yield (
            rows,
            mechanism.attention_map(
                q_BHLK, k_BHLK, hidden_BLD=hidden_BLD, mask_BL=mask_BL, causal=causal, rows=rows
            ),
        )
