"""The Performer that estimates softmax attention, FAVOR+ (Choromanski et al., arXiv 2009.14794)."""

from typing import final

from protlm.attention.performer.base import Performer
from protlm.attention.performer.features import softmax_features


@final
class PerformerSoftmax(Performer):
    """Attention with an unbiased positive estimate of exp(q·k / √K), normalised over the keys.

    The estimate is the mean over R rows ω_r of exp(ω_r·(q̂ + k̂) - (|q̂|² + |k̂|²)/2) with
    x̂ = x / K^(1/4) (Lemma 1); `softmax_features` has the form that is computed. Rows ω_r are
    N(0, I), orthogonal in blocks of K. The relative standard deviation of one weight is about
    √(exp(|q̂ + k̂|²) / R), so large queries and keys need many features.

    Args:
        head_dim: width K of a query and a key.
        num_features: rows R of the projection.
        redraw_every: optimiser steps between two draws; None keeps the first for good.
        seed: what the projections are drawn from, together with the redraw index.

    Raises:
        UserError: a number of features or steps below 1.
    """

    def __init__(
        self,
        *,
        head_dim: int,
        num_features: int = 256,
        redraw_every: int | None = 1000,
        seed: int = 0,
    ) -> None:
        super().__init__(
            maps=softmax_features(head_dim),
            head_dim=head_dim,
            num_features=num_features,
            redraw_every=redraw_every,
            seed=seed,
        )
