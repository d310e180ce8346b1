"""Pooling: from the hidden states of a protein's positions to its vectors."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from protlm.attention.ops.numerics import accum_dtype, in_float64
from protlm.options.embed import Pooling

Ranges: TypeAlias = Sequence[tuple[int, int]] | np.ndarray


def residue_means(hidden_BLD: Tensor, lengths_B: Tensor, start: int) -> Tensor:
    """Returns the means over the residues of a padded batch, BD."""
    is_residue_BL1 = _is_residue(hidden_BLD, lengths_B, start)
    # In float16, the sum of a thousand residues can exceed the largest number.
    total_BD = (hidden_BLD * is_residue_BL1).sum(1, dtype=accum_dtype(hidden_BLD))
    return (total_BD / lengths_B[:, None]).to(hidden_BLD.dtype)


def pool(
    hidden_BLD: Tensor,
    lengths: Sequence[int],
    pooling: Pooling,
    ranges: Sequence[Ranges] = (),
    *,
    start: int = 1,
) -> Tensor:
    """Returns the vectors of a batch in float32, [rows, D], those of its proteins in order.

    The number of operations does not depend on that of the proteins. The first residue is at
    position `start`. Ranges are given by their first and last residue, counted from 1.
    """
    if pooling in (Pooling.cls, Pooling.bos):
        return hidden_BLD[:, 0].float()
    hidden_BLD, lengths_B = hidden_BLD.float(), torch.tensor(lengths, device=hidden_BLD.device)
    match pooling:
        case Pooling.mean:
            return residue_means(hidden_BLD, lengths_B, start)
        case Pooling.max:
            is_residue_BL1 = _is_residue(hidden_BLD, lengths_B, start)
            return hidden_BLD.masked_fill(~is_residue_BL1, -torch.inf).amax(1)
        case Pooling.std:
            centered_BLD = hidden_BLD - residue_means(hidden_BLD, lengths_B, start)[:, None]
            return residue_means(centered_BLD.square(), lengths_B, start).sqrt()
        case Pooling.ranges:
            return _range_means(hidden_BLD, ranges, start)
        case _:
            return hidden_BLD[_is_residue(hidden_BLD, lengths_B, start).squeeze(2)]


def _is_residue(hidden_BLD: Tensor, lengths_B: Tensor, start: int) -> Tensor:
    place_L1 = torch.arange(hidden_BLD.shape[1], device=hidden_BLD.device)[:, None] - start
    return (place_L1 >= 0) & (place_L1 < lengths_B[:, None, None])


def _range_means(hidden_BLD: Tensor, ranges: Sequence[Ranges], start: int) -> Tensor:
    """Returns the means of segments of positions, which may overlap."""
    width = hidden_BLD.shape[1]
    spans = [np.asarray(own, np.int64).reshape(-1, 2) + start - 1 for own in ranges]
    # Beyond its row is another protein.
    assert all((own < width).all() for own in spans)
    joined = np.concatenate([own + row * width for row, own in enumerate(spans)])
    first, last = torch.from_numpy(joined).to(hidden_BLD.device).T
    size = last - first + 1
    segment = torch.arange(len(size), device=size.device).repeat_interleave(size)
    place = torch.arange(len(segment), device=size.device) + (last + 1 - size.cumsum(0))[segment]
    # Float64, so that the order of additions does not matter.
    values = in_float64(hidden_BLD.flatten(0, 1)[place])
    sums = values.new_zeros(len(size), values.shape[1])
    sums.index_add_(0, segment.to(values.device), values)
    return (sums / size[:, None].to(values.device)).float().to(hidden_BLD.device)
