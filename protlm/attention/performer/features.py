"""Feature maps φ with φ(q)·φ(k) an estimate of, or equal to, a kernel (arXiv 2009.14794)."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

# Takes the gradient of the features, BHLR, which it may overwrite, to that of the vectors, BHLK.
Pullback = Callable[[Tensor], Tensor]


class Features(NamedTuple):
    """The features of some vectors, and how a gradient goes back through them."""

    phi_BHLR: Tensor
    pullback: Pullback


class FeatureMap(ABC):
    """The features of queries and keys, by one projection.

    The features of a position depend on nothing but the position's vector: not on other samples,
    not on the padding, not on the future.
    """

    @abstractmethod
    def queries(self, q_BHLK: Tensor) -> Features:
        """The features of queries, up to a factor of each query, which normalising removes."""

    @abstractmethod
    def keys(self, k_BHLK: Tensor) -> Features:
        """The features of keys."""

    @abstractmethod
    def log_factor(self, q_BHLK: Tensor) -> Tensor:
        """log c, BHL1, such that the kernel of a query and a key is c times φ(q)·φ(k)."""


# Makes a feature map from the random rows ω_r, RK in the dtype of the computation; from None where
# the features are the vectors' own coordinates.
FeatureMapFactory = Callable[[Tensor | None], FeatureMap]
