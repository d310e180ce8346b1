"""Feature maps φ with φ(q)·φ(k) an estimate of, or equal to, a kernel (arXiv 2009.14794)."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

# Maps the gradient of the features, BHLR, to that of the vectors, BHLK; may overwrite its argument.
Pullback = Callable[[Tensor], Tensor]


class Features(NamedTuple):
    """The features of vectors, and the pullback of their gradient."""

    phi_BHLR: Tensor
    pullback: Pullback


class FeatureMap(ABC):
    """A feature map of queries and keys, with one projection.

    The features of a position depend only on the vector of the position.

    Args:
        projection_RK: the random rows ω_r, in the dtype of the computation; None for features of
            the coordinates of the vectors.
    """

    # Features of each row or coordinate.
    features_per_row: ClassVar[int] = 1
    # Whether there are fused kernels; an instance may override it.
    has_fused: bool = False

    def __init__(self, projection_RK: Tensor | None = None) -> None:
        self.projection_RK = projection_RK

    def num_features(self, width: int) -> int:
        """Returns the number R of features of a vector."""
        rows_RK = self.projection_RK
        return self.features_per_row * (width if rows_RK is None else len(rows_RK))

    def fused_rows(self, like: Tensor) -> tuple[Tensor, Tensor | None, float]:
        """Returns what fused kernels take in place of the map, on the device of a tensor.

        These are rows, RK; constants of positive features, R, or None for ReLU; and ε of ReLU.
        """
        raise NotImplementedError

    @abstractmethod
    def queries(self, q_BHLK: Tensor, reference_BH1R: Tensor | None = None) -> Features:
        """Computes the features of queries, up to a factor per query that cancels in the output.

        Only exponentials have a reference, to which φ(q) and φ(k) are relative.
        """

    @abstractmethod
    def keys(self, k_BHLK: Tensor) -> Features:
        """Computes the features of keys."""

    @abstractmethod
    def log_factor(self, q_BHLK: Tensor, reference_BH1R: Tensor | None = None) -> Tensor:
        """Returns log c, BHL1, such that the kernel of a query and a key is c times φ(q)·φ(k)."""


class ExponentialFeatureMap(FeatureMap):
    """A feature map of exponentials, whose logits may be far outside the range of a float.

    Linear attention subtracts a reference from the logits of each feature before exponentiating.
    2^(key logit - reference) · 2^(query logit + reference) does not depend on the reference, which
    therefore has no gradient. By default `queries` and `keys` have no reference.

    Logits are log₂ φ, and come with the pullback of ln φ.
    """

    @abstractmethod
    def query_logits(
        self, q_BHLK: Tensor, reference_BH1R: Tensor | None = None
    ) -> tuple[Tensor, Pullback]:
        """Computes the logits of queries, plus the reference."""

    @abstractmethod
    def key_logits(self, k_BHLK: Tensor) -> tuple[Tensor, Pullback]:
        """Computes the logits of keys."""

    def queries(self, q_BHLK: Tensor, reference_BH1R: Tensor | None = None) -> Features:
        """Computes the features of queries; the largest one of each query is 1."""
        logits_BHLR, pullback = self.query_logits(q_BHLK, reference_BH1R)
        # The maximum cancels in the normalized output, and therefore has no gradient.
        logits_BHLR.sub_(logits_BHLR.amax(dim=-1, keepdim=True))
        return exponential(logits_BHLR, pullback)

    def keys(self, k_BHLK: Tensor) -> Features:
        return exponential(*self.key_logits(k_BHLK))


def exponential(logits_BHLR: Tensor, pullback: Pullback) -> Features:
    """Exponentiates logits in place."""
    phi_BHLR = logits_BHLR.exp2_()
    return Features(phi_BHLR, lambda dphi_BHLR: pullback(dphi_BHLR.mul_(phi_BHLR)))


def logit_floor(dtype: torch.dtype) -> float:
    """Returns the logit of a padded key, which is finite, so that differences are not NaN."""
    return torch.finfo(dtype).min / 4


# Creates a feature map from the random rows ω_r, RK in the dtype of the computation; from None for
# features that are the coordinates of the vectors.
FeatureMapFactory = Callable[[Tensor | None], FeatureMap]
