"""Orthogonal random projections (Choromanski et al., arXiv 2009.14794, section 2.4)."""

import hashlib

import torch
from torch import Tensor


def orthogonal_projection(num_features: int, head_dim: int, generator: torch.Generator) -> Tensor:
    """Draws R rows of width K, each distributed as N(0, I), orthogonal within blocks of K rows.

    A block is a uniformly distributed orthogonal matrix; every row is then stretched by an
    independent chi(K) norm, so the kernel estimate is unbiased. Drawn in float64.
    """
    blocks = []
    for start in range(0, num_features, head_dim):
        block_KK = _uniform_orthogonal(head_dim, generator)
        blocks.append(block_KK[: num_features - start])
    directions_RK = torch.cat(blocks)
    norms_R = _standard_normal(num_features, head_dim, generator).norm(dim=1)
    return directions_RK * norms_R[:, None]


def projection_generator(seed: int, index: int) -> torch.Generator:
    """The CPU generator of draw number `index`: a pure function of (seed, index)."""
    # A hash keeps neighbouring pairs apart, where seed + index would make them collide.
    digest = hashlib.sha256(f"projection {seed} {index}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8]) >> 1)


def _uniform_orthogonal(dim: int, generator: torch.Generator) -> Tensor:
    q_KK, r_KK = torch.linalg.qr(_standard_normal(dim, dim, generator))
    # LAPACK leaves the signs of R to the data. Without this the rows are not uniform on the
    # sphere and the estimate of the kernel is biased (by 22 % between positive vectors, K = 16).
    return q_KK * torch.diagonal(r_KK).sign()


def _standard_normal(num_rows: int, num_columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(num_rows, num_columns, generator=generator, dtype=torch.float64)
