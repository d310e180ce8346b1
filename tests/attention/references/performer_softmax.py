"""The textbook FAVOR+ estimates: arXiv 2009.14794, Lemma 1, with the mechanism's rows."""

import math

from torch import Tensor

from tests.attention.truth import Given, weights


@weights(
    {},
    {"num_features": 20, "optimal_for": 4.0, "antithetic": True, "projection": "givens"},
    further=[
        {"num_features": 20},
        {"num_features": 20, "estimator": "hyperbolic", "projection": "iid"},
        {"num_features": 20, "estimator": "regularized", "projection": "hadamard"},
        {"num_features": 40, "estimator": "trigonometric", "denominator_floor": 20.0},
        {"num_features": 40, "estimator": "trigonometric", "normalizer": "rmsnorm"},
        {"num_features": 20, "normalizer": "rmsnorm"},
    ],
)
def performer_softmax(given: Given) -> Tensor:
    """The mean over the rows of Lemma 1's features, or of arXiv 2205.15317's with their A.

    Trigonometric weights are cosines of the difference, without the factor of the query.
    """
    rows_RK, width = given.tensors["projection"], given.head_dim
    q_BHLK, k_BHLK = (x * width**-0.25 for x in (given.q_BHLK, given.k_BHLK))
    q_BHLR, k_BHLR = q_BHLK @ rows_RK.mT, k_BHLK @ rows_RK.mT
    half_q, half_k = (x.square().sum(-1, keepdim=True) / 2 for x in (q_BHLK, k_BHLK))
    if given.options["estimator"] == "trigonometric":
        cosines = q_BHLR.sin() @ k_BHLR.sin().mT + q_BHLR.cos() @ k_BHLR.cos().mT
        return cosines * half_k.exp().mT / len(rows_RK)
    stretch, exponent, norm = 1.0, 0.0, given.options["optimal_for"]
    if norm is not None:
        rho = math.sqrt((2 * norm + width) ** 2 + 8 * width * norm) - 2 * norm - width
        exponent = (1 - 4 * norm / rho) / 8
        stretch = math.sqrt(1 - 4 * exponent)
    of_rows_R = exponent * rows_RK.square().sum(-1)
    phi_q = (stretch * q_BHLR - half_q + of_rows_R).exp()
    phi_k = (stretch * k_BHLR - half_k + of_rows_R).exp()
    return stretch**width * phi_q @ phi_k.mT / len(rows_RK)
