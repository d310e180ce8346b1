"""Pooling: from the hidden states of a protein's positions to its vectors."""

from collections.abc import Sequence
from enum import StrEnum

import torch
from torch import Tensor

from protlm.attention.ops.numerics import accum_dtype


class Pooling(StrEnum):
    """What is kept of a protein: statistics over residues, `<cls>`, each residue, or ranges.

    `cls` is the first token before the residues; `bos` is its other name, that of esm-extract.
    `std` divides by the number of residues; `features` are states for a sparse autoencoder.
    """

    mean = "mean"
    max = "max"
    std = "std"
    cls = "cls"
    bos = "bos"
    per_tok = "per_tok"
    ranges = "ranges"
    features = "features"

    def num_rows(self, num_residues: int, num_ranges: int) -> int:
        rows = num_ranges if self is Pooling.ranges else num_residues
        return rows if self.is_matrix else 1

    @property
    def is_matrix(self) -> bool:
        return self in (Pooling.per_tok, Pooling.ranges, Pooling.features)


def residue_means(hidden_BLD: Tensor, lengths_B: Tensor, start: int) -> Tensor:
    """Returns the means of a padded batch, BD; `pool` adds the residues in another order."""
    lengths_B1 = lengths_B[:, None]
    place_L = torch.arange(hidden_BLD.shape[1], device=hidden_BLD.device)
    is_residue_BL = (place_L >= start) & (place_L < lengths_B1 + start)
    # In float16, the sum of a thousand residues can exceed the largest number.
    total_BD = (hidden_BLD * is_residue_BL[..., None]).sum(1, dtype=accum_dtype(hidden_BLD))
    return (total_BD / lengths_B1).to(hidden_BLD.dtype)


def pool(
    hidden_LD: Tensor,
    num_residues: int,
    pooling: Pooling,
    ranges: Sequence[tuple[int, int]] = (),
    *,
    start: int = 1,
) -> Tensor:
    """Returns the vectors of one protein in float32: (D,), or (rows, D) of a matrix.

    The first residue is at position `start`.

    Ranges are given by their first and last residue, counted from 1.
    """
    if pooling in (Pooling.cls, Pooling.bos):
        return hidden_LD[0].float()
    residues_LD = hidden_LD[start : num_residues + start].float()
    match pooling:
        case Pooling.mean:
            return residues_LD.mean(0)
        case Pooling.max:
            return residues_LD.amax(0)
        case Pooling.std:
            return residues_LD.std(0, correction=0)
        case Pooling.ranges:
            rows = [residues_LD[first - 1 : last].mean(0) for first, last in ranges]
            return torch.stack(rows) if rows else residues_LD[:0]
        case _:
            return residues_LD
