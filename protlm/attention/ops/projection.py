"""Random projections: the rows ω_r of random features (arXiv 2009.14794, sections 2.4 and B.2)."""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import final

import torch
from torch import Tensor

from protlm.system.errors import UserError


class RowSampling(StrEnum):
    """The joint distribution of the directions of the rows."""

    orthogonal = "orthogonal"
    iid = "iid"
    hadamard = "hadamard"
    givens = "givens"


class RowNorms(StrEnum):
    """The distribution of the lengths of the rows."""

    chi = "chi"
    sqrt_dim = "sqrt_dim"


@final
@dataclass(frozen=True)
class Projection:
    """A distribution of R random rows of width K: directions times independent norms.

    Directions are independent of each other, or orthogonal within blocks of K rows. A block is a
    uniform orthogonal matrix, a product (HD₁)(HD₂)(HD₃) of Walsh-Hadamard matrices and random
    signs, or a product of K⌈ln K⌉ Givens rotations. The rows of the last two are only approximately
    uniform on the sphere, so that estimates of a kernel have a small bias. Norms are `chi`, so that
    a row is N(0, I), or all √K. Of `antithetic` rows, the second half are the negatives of the
    first.
    """

    num_features: int
    head_dim: int
    sampling: str = RowSampling.orthogonal
    row_norms: str = RowNorms.chi
    antithetic: bool = False

    def __post_init__(self) -> None:
        if self.antithetic and self.num_features % 2:
            raise UserError(
                f"attention.num_features={self.num_features} must be even where features come in "
                "mirrored pairs (attention.antithetic=true, attention.estimator=hyperbolic); "
                f"type attention.num_features={self.num_features + 1}"
            )
        allowed = {
            RowSampling.hadamard: (self.head_dim.bit_count() == 1, "that is a power of two"),
            RowSampling.givens: (self.head_dim >= 2, "of 2 or more"),
        }
        exists, condition = allowed.get(RowSampling(self.sampling), (True, ""))
        if not exists:
            raise UserError(
                f"attention.projection={self.sampling} needs a head width (model.model_dim / "
                f"model.num_heads) {condition}, not {self.head_dim}; "
                "type attention.projection=orthogonal"
            )

    def draw(self, seed: int, index: int) -> Tensor:
        """Returns draw number `index`, RK in float64: a pure function of (seed, index)."""
        generator = projection_generator(seed, index)
        num_rows = self.num_features // 2 if self.antithetic else self.num_features
        directions_RK = _DIRECTIONS[RowSampling(self.sampling)](num_rows, self.head_dim, generator)
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


def _hadamard_directions(num_rows: int, dim: int, generator: torch.Generator) -> Tensor:
    """Draws blocks (HD₁)(HD₂)(HD₃) with Walsh-Hadamard matrices H and random signs D."""
    num_blocks = math.ceil(num_rows / dim)
    signs = 2.0 * torch.randint(2, (3, num_blocks, 1, dim), generator=generator) - 1
    first, second, third = _walsh_hadamard(dim) * signs
    return (first @ second @ third).flatten(0, 1)[:num_rows]


def _walsh_hadamard(dim: int) -> Tensor:
    """Returns the symmetric orthogonal matrix with entries ±1/√K (Sylvester's construction)."""
    doubling = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / math.sqrt(2)
    matrix_KK = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix_KK) < dim:
        matrix_KK = torch.kron(doubling, matrix_KK)
    return matrix_KK


def _givens_directions(num_rows: int, dim: int, generator: torch.Generator) -> Tensor:
    """Draws blocks that are products of K⌈ln K⌉ rotations by random angles in random planes."""
    num_blocks = math.ceil(num_rows / dim)
    num_rotations = dim * math.ceil(math.log(dim))
    shape = (num_rotations, num_blocks)
    first = torch.randint(dim, shape, generator=generator)
    # The offset makes the axes of a plane differ.
    second = (first + torch.randint(1, dim, shape, generator=generator)) % dim
    angles = 2 * math.pi * torch.rand(shape, generator=generator, dtype=torch.float64)
    blocks = torch.eye(dim, dtype=torch.float64).repeat(num_blocks, 1, 1)
    each = torch.arange(num_blocks)
    for i, j, angle in zip(first, second, angles[..., None], strict=True):
        row_i, row_j = blocks[each, i], blocks[each, j]
        blocks[each, i] = angle.cos() * row_i - angle.sin() * row_j
        blocks[each, j] = angle.sin() * row_i + angle.cos() * row_j
    return blocks.flatten(0, 1)[:num_rows]


def _standard_normal(num_rows: int, num_columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(num_rows, num_columns, generator=generator, dtype=torch.float64)


# Each function returns R unit rows, RK, from (R, K, generator).
_DIRECTIONS: Mapping[RowSampling, Callable[[int, int, torch.Generator], Tensor]] = {
    RowSampling.orthogonal: _orthogonal_directions,
    RowSampling.iid: _iid_directions,
    RowSampling.hadamard: _hadamard_directions,
    RowSampling.givens: _givens_directions,
}
