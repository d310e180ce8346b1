"""Feature maps φ with φ(q)·φ(k) an estimate of, or equal to, a kernel (arXiv 2009.14794)."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

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
    """

    @abstractmethod
    def queries(self, q_BHLK: Tensor) -> Features:
        """Computes the features of queries, up to a factor per query that cancels in the output."""

    @abstractmethod
    def keys(self, k_BHLK: Tensor) -> Features:
        """Computes the features of keys."""

    @abstractmethod
    def log_factor(self, q_BHLK: Tensor, reference_BH1R: Tensor | None = None) -> Tensor:
        """Returns log c, BHL1, such that the kernel of a query and a key is c times φ(q)·φ(k).

        Only exponentials have a reference, to which φ(q) and φ(k) are relative.
        """


class Logits(NamedTuple):
    """The base-2 logarithms of features.

    Attributes:
        logits_BHLR: log₂ φ.
        pullback: maps the gradient of ln φ to that of the vectors.
    """

    logits_BHLR: Tensor
    pullback: Pullback


class ExponentialFeatureMap(FeatureMap):
    """A feature map of exponentials, whose logits may be far outside the range of a float.

    Linear attention subtracts a reference from the logits of each feature before exponentiating.
    2^(key logit - reference) · 2^(query logit + reference) does not depend on the reference, which
    therefore has no gradient. By default `queries` and `keys` have no reference.
    """

    @abstractmethod
    def query_logits(self, q_BHLK: Tensor, reference_BH1R: Tensor | None = None) -> Logits:
        """Computes the logits of queries, plus the reference."""

    @abstractmethod
    def key_logits(self, k_BHLK: Tensor) -> Logits:
        """Computes the logits of keys."""

    def queries(self, q_BHLK: Tensor, reference_BH1R: Tensor | None = None) -> Features:
        """See `FeatureMap.queries`; the largest feature of a query is 1."""
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
