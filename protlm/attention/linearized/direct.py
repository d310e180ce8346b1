"""Rows of causal attention whose exponential features have no common reference, within chunks.

Such chunks are rare: the feature of a key has to be 2⁶⁴ times those of all keys before the chunk,
as in the first chunk of keys with large norms. Data-dependent operations are in custom operators,
so that the compiler of torch sees one graph.

Tensors without a suffix are (B, H, chunks, 64, width).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling


def running_references(peaks: Tensor, largest_rise: float) -> Tensor:
    """Returns the reference before each chunk and after the last one, (B, H, chunks + 1, R).

    The first one is 0. A reference rises to the peak of a chunk more than `largest_rise` above it.

    Args:
        peaks: the largest logit of each feature in each chunk, (B, H, chunks, R).
        largest_rise: the largest logit relative to its reference.
    """
    return _call(_running_references, _RUNNING_REFERENCES, peaks, largest_rise)


def rows(
    query_logits: Tensor, key_logits: Tensor, references: Tensor, is_direct: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the largest sum of logits of each direct row, and its weights relative to it.

    Args:
        query_logits: a_ir.
        key_logits: b_jr.
        references: the reference before each chunk, (B, H, chunks, 1, R).
        is_direct: true for the rows to compute, (B, H, chunks, 64, 1); others are 0.

    Returns:
        m_i = max_r (a_ir + max(reference_r, max_{j≤i} b_jr)), (B, H, chunks, 64, 1), and
        Σ_r 2^(a_ir + b_jr - m_i) for j ≤ i, (B, H, chunks, 64, 64).
    """
    return _call(_rows, _ROWS, query_logits, key_logits, references, is_direct)


def gradients(
    query_logits: Tensor, key_logits: Tensor, is_direct: Tensor, dweights: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the logits, in units of the natural logarithm, through direct rows.

    Args:
        query_logits: a_ir - m_i.
        key_logits: b_jr.
        is_direct: true for the rows that were computed.
        dweights: gradient of the weights, (B, H, chunks, 64, 64); 0 above the diagonal.
    """
    return _call(_gradients, _GRADIENTS, query_logits, key_logits, is_direct, dweights)


def _running_references(peaks: Tensor, largest_rise: float) -> Tensor:
    reference = torch.zeros_like(peaks[:, :, 0])
    references = [reference]
    for peak in peaks.unbind(dim=2):
        reference = torch.where(peak > reference + largest_rise, peak, reference)
        references.append(reference)
    return torch.stack(references, dim=2)


def _rows(
    query_logits: Tensor, key_logits: Tensor, references: Tensor, is_direct: Tensor
) -> tuple[Tensor, Tensor]:
    size = query_logits.shape[-2]
    all_maxima = torch.zeros_like(query_logits[..., :1])
    all_weights = query_logits.new_zeros(*query_logits.shape[:-1], size)
    chosen = is_direct.any(dim=-2)[..., 0]
    queries, keys, is_direct = query_logits[chosen], key_logits[chosen], is_direct[chosen]
    highest = torch.maximum(keys.cummax(dim=1).values, references[chosen])
    maxima = (queries + highest).amax(dim=-1, keepdim=True)
    weights = queries.new_zeros(*queries.shape[:-1], size)
    for row in range(size):
        if bool(is_direct[:, row].any()):
            terms = keys[:, : row + 1] + (queries - maxima)[:, row : row + 1]
            weights[:, row, : row + 1] = terms.exp2_().sum(dim=-1)
    all_maxima[chosen] = maxima * is_direct
    all_weights[chosen] = weights * is_direct
    return all_maxima, all_weights


def _gradients(
    query_logits: Tensor, key_logits: Tensor, is_direct: Tensor, dweights: Tensor
) -> tuple[Tensor, Tensor]:
    found = torch.zeros_like(query_logits), torch.zeros_like(key_logits)
    chosen = is_direct.any(dim=-2)[..., 0]
    queries, keys, is_direct = query_logits[chosen], key_logits[chosen], is_direct[chosen]
    dweights = (dweights[chosen] * is_direct)[..., None]
    dqueries, dkeys = torch.zeros_like(queries), torch.zeros_like(keys)
    for row in range(queries.shape[1]):
        if bool(is_direct[:, row].any()):
            # Other rows have other maxima, so that their terms may be infinite.
            terms = keys[:, : row + 1] + queries[:, row : row + 1]
            terms = terms.masked_fill_(~is_direct[:, row : row + 1], -torch.inf).exp2_()
            terms *= dweights[:, row, : row + 1]
            dqueries[:, row] = terms.sum(dim=1)
            dkeys[:, : row + 1] += terms
    for whole, part in zip(found, (dqueries, dkeys), strict=True):
        whole[chosen] = part
    return found


def _call(function: Callable[..., Any], operator: Callable[..., Any], *args: Any) -> Any:
    return operator(*args) if is_compiling() else function(*args)


_RUNNING_REFERENCES = torch.library.custom_op(
    "protlm::running_references", _running_references, mutates_args=()
)
_ROWS = torch.library.custom_op("protlm::direct_rows", _rows, mutates_args=())
_GRADIENTS = torch.library.custom_op("protlm::direct_gradients", _gradients, mutates_args=())


@_RUNNING_REFERENCES.register_fake
def _(peaks: Tensor, largest_rise: float) -> Tensor:
    return torch.cat([peaks[:, :, :1], peaks], dim=2)


@_ROWS.register_fake
def _(
    query_logits: Tensor, key_logits: Tensor, references: Tensor, is_direct: Tensor
) -> tuple[Tensor, Tensor]:
    weights = query_logits.new_empty(*query_logits.shape[:-1], query_logits.shape[-2])
    return torch.empty_like(query_logits[..., :1]), weights


@_GRADIENTS.register_fake
def _(
    query_logits: Tensor, key_logits: Tensor, is_direct: Tensor, dweights: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query_logits), torch.empty_like(key_logits)
