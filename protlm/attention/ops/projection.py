"""Random projections: the rows ω_r of random features (arXiv 2009.14794, sections 2.4 and B.2)."""

import hashlib
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import final

import torch
from torch import Tensor

from protlm.system.errors import OptionError


class RowSampling(StrEnum):
    """The joint distribution of the directions of the rows."""

    orthogonal = "orthogonal"
    iid = "iid"


class RowNorms(StrEnum):
    """The distribution of the lengths of the rows."""

    chi = "chi"
    sqrt_dim = "sqrt_dim"


@final
@dataclass(frozen=True)
class Projection:
    """A distribution of R random rows of width K: directions times independent norms.

    Directions are independent of each other, or orthogonal within blocks of K rows, each a uniform
    orthogonal matrix. Norms are `chi`, so that a row is N(0, I), or all √K. Of `antithetic` rows,
    the second half are the negatives of the first.
    """

    num_features: int
    head_dim: int
    sampling: str = RowSampling.orthogonal
    row_norms: str = RowNorms.chi
    antithetic: bool = False

    def __post_init__(self) -> None:
        if self.antithetic and self.num_features % 2:
            raise OptionError(
                lambda at: (
                    f"{at}num_features={self.num_features} must be even where features come in "
                    f"mirrored pairs ({at}antithetic=true, {at}estimator=hyperbolic); type "
                    f"{at}num_features={self.num_features + 1}"
                )
            )

    def draw(self, seed: int, index: int) -> Tensor:
        """Returns draw number `index`, RK in float64: a pure function of (seed, index)."""
        generator = projection_generator(seed, index)
        num_rows = self.num_features // 2 if self.antithetic else self.num_features
        directions = _iid_directions if self.sampling == RowSampling.iid else _orthogonal_directions
        directions_RK = directions(num_rows, self.head_dim, generator)
        rows_RK = directions_RK * self._norms(num_rows, generator)[:, None]
        return torch.cat([rows_RK, -rows_RK]) if self.antithetic else rows_RK

    def _norms(self, num_rows: int, generator: torch.Generator) -> Tensor:
        if self.row_norms == RowNorms.chi:
            return _standard_normal(num_rows, self.head_dim, generator).norm(dim=1)
        return torch.full((num_rows,), math.sqrt(self.head_dim), dtype=torch.float64)


def projection_generator(seed: int, index: int) -> torch.Generator:
    """Creates the CPU generator of draw number `index`, a pure function of (seed, index)."""
    # A hash, because seed + index would collide for neighboring pairs.
    digest = hashlib.sha256(f"projection {seed} {index}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8]) >> 1)


def _iid_directions(num_rows: int, dim: int, generator: torch.Generator) -> Tensor:
    rows_RK = _standard_normal(num_rows, dim, generator)
    return rows_RK / rows_RK.norm(dim=1, keepdim=True)


def _orthogonal_directions(num_rows: int, dim: int, generator: torch.Generator) -> Tensor:
    """Draws blocks of uniformly distributed orthogonal matrices."""
    num_blocks = math.ceil(num_rows / dim)
    gaussian = torch.stack([_standard_normal(dim, dim, generator) for _ in range(num_blocks)])
    q, r = torch.linalg.qr(gaussian)
    # In LAPACK the signs of R depend on the data. Without this correction the rows are not uniform
    # on the sphere, and the estimate of the kernel is biased (by 22 % between positive vectors,
    # K = 16).
    signs = r.diagonal(dim1=-2, dim2=-1).sign()
    return (q * signs[:, None]).flatten(0, 1)[:num_rows]


def _standard_normal(num_rows: int, num_columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(num_rows, num_columns, generator=generator, dtype=torch.float64)
