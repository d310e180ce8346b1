"""Pairs of exponentials, exp(x) and exp(-x), as features (Hedgehog, arXiv 2402.04347)."""

import math
from typing import ClassVar, final

import torch
from torch import Tensor

from protlm.attention.linearized.features import ExponentialFeatureMap, Pullback

_LOG2_E = math.log2(math.e)


@final
class ExponentialPairs(ExponentialFeatureMap):
    """The features φ(x) = [exp(x), exp(-x)] of every coordinate, R = 2K, without parameters.

    Zhang et al., arXiv 2402.04347, section 4.1; the learned matrix is applied to x before.
    """

    features_per_row: ClassVar[int] = 2

    def query_logits(
        self, q_BHLK: Tensor, reference_BH1R: Tensor | None = None
    ) -> tuple[Tensor, Pullback]:
        logits_BHLR, pullback = self.key_logits(q_BHLK)
        if reference_BH1R is not None:
            logits_BHLR.add_(reference_BH1R)
        return logits_BHLR, pullback

    def key_logits(self, k_BHLK: Tensor) -> tuple[Tensor, Pullback]:
        scaled_BHLK = k_BHLK * _LOG2_E

        def pullback(dlogit_BHLR: Tensor) -> Tensor:
            plus_BHLK, minus_BHLK = dlogit_BHLR.chunk(2, dim=-1)
            return plus_BHLK - minus_BHLK

        return torch.cat([scaled_BHLK, -scaled_BHLK], dim=-1), pullback

    def log_factor(self, q_BHLK: Tensor, reference_BH1R: Tensor | None = None) -> Tensor:
        """Returns log c; the kernel is the mean over the features."""
        logits_BHLR, _ = self.query_logits(q_BHLK, reference_BH1R)
        maximum_BHL1 = logits_BHLR.amax(dim=-1, keepdim=True) / _LOG2_E
        return maximum_BHL1 - math.log(logits_BHLR.shape[-1])
