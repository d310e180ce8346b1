"""Contacts from attention maps: a sparse logistic regression over all heads.

Rao et al. 2020 (doi:10.1101/2020.12.15.422761): every map is symmetrized and corrected by the
average product (APC, Dunn et al. 2008), and the regression is fitted to a few proteins of known
structure.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, final

import numpy as np

from protlm.errors import InputDataError
from protlm.model.pretrained import PretrainedModel

MIN_SEPARATION = 6


# The strength of the L1 penalty in Rao et al. 2020.
INVERSE_PENALTY = 0.15


# Maps are float32; the correction adds up their errors.
_ROUNDING = 8 * float(np.finfo(np.float32).eps)


def symmetrize(maps: np.ndarray) -> np.ndarray:
    """Adds each map to its transpose, [..., L, L].

    >>> symmetrize(np.array([[1.0, 2.0], [0.0, 3.0]])).tolist()
    [[2.0, 2.0], [2.0, 6.0]]
    """
    return maps + np.swapaxes(maps, -1, -2)


def apc(maps: np.ndarray) -> np.ndarray:
    """Applies the average product correction, F_ij - F_i· F_·j / F_··, to each map [..., L, L].

    A map whose entries sum to 0 is returned unchanged.
    """
    rows = maps.sum(axis=-1, keepdims=True)
    columns = maps.sum(axis=-2, keepdims=True)
    totals = maps.sum(axis=(-1, -2), keepdims=True)
    return maps - rows * columns / np.where(totals == 0, np.inf, totals)


def features(maps_NHLL: np.ndarray) -> np.ndarray:
    """Returns the inputs of the regression: symmetrized, corrected maps, float32 [N·H, L, L].

    Values within the rounding of the maps become 0, so that a uniform map has no features.

    Args:
        maps_NHLL: maps of all layers and heads, without the special tokens.
    """
    symmetric_NHLL = symmetrize(maps_NHLL.astype(np.float64))
    corrected_NHLL = apc(symmetric_NHLL)
    rounding_NH11 = _ROUNDING * np.abs(symmetric_NHLL).max(axis=(-1, -2), keepdims=True)
    corrected_NHLL[np.abs(corrected_NHLL) < rounding_NH11] = 0.0
    return corrected_NHLL.astype(np.float32).reshape(-1, *maps_NHLL.shape[-2:])


def head_features(model: PretrainedModel, sequence: str) -> np.ndarray:
    """Returns the `features` of one protein, [N·H, L, L], heads of the first layer first.

    Raises:
        InputDataError: a letter is not a residue.
        UserError: the sequence is longer than the model takes.
    """
    maps = model.attention_maps(model.tokenize([sequence]))
    residues = slice(1, -1)
    layers = [
        features(map_BHLL[:, :, residues, residues].float().numpy())
        for _, map_BHLL in sorted(maps.items())
    ]
    return np.concatenate(layers)


@final
class ContactRegression:
    """L1-penalized logistic regression from heads to contacts, over pairs 6 or more apart.

    H in its suffixes counts the heads of all layers.

    Args:
        seed: seed of the solver's order of coordinates.
        scaled: divide the features of each head by their standard deviation before the fit. The
            paper does not; then the penalty removes every head whose maps are nearly flat, as
            those of linear attention are.
    """

    def __init__(self, *, seed: int = 0, scaled: bool = True) -> None:
        self.seed = seed
        self.scaled = scaled
        self.weights_H = np.zeros(0)
        self.intercept = 0.0

    def fit(self, examples: Iterable[tuple[np.ndarray, np.ndarray]]) -> "ContactRegression":
        """Fits to pairs of `features` and contact map, one a protein; unresolved pairs are ignored.

        Raises:
            InputDataError: the examples have no contacts, or only contacts.
        """
        from sklearn.linear_model import LogisticRegression

        pairs = [_pairs(features_HLL, contacts_LL) for features_HLL, contacts_LL in examples]
        labels = np.concatenate([label for _, label in pairs]) if pairs else np.zeros(0)
        if len(np.unique(labels)) < 2:
            raise InputDataError(
                "the structures to fit to have no contacts, or only contacts, between "
                f"residues {MIN_SEPARATION} or more apart; give more structures"
            )
        values = np.concatenate([values for values, _ in pairs])
        num_heads = values.shape[1]
        spread_H = values.std(axis=0, dtype=np.float64) if self.scaled else np.ones(num_heads)
        spread_H[spread_H == 0] = 1.0
        # As in the paper, classes are not balanced.
        solver = LogisticRegression(
            solver="liblinear", l1_ratio=1.0, C=INVERSE_PENALTY, random_state=self.seed
        )
        solver.fit(values / spread_H, labels)
        self.weights_H = solver.coef_[0].astype(np.float64) / spread_H
        self.intercept = float(np.ravel(solver.intercept_)[0])
        return self

    def predict(self, features_HLL: np.ndarray) -> np.ndarray:
        """Returns the contact probability of every pair, at any separation, float64 LL."""
        assert len(self.weights_H) == len(features_HLL), "fitted on other heads, or not at all"
        logits_LL = np.tensordot(self.weights_H, features_HLL, axes=1) + self.intercept
        return 0.5 * (1.0 + np.tanh(0.5 * logits_LL))

    @property
    def num_heads_used(self) -> int:
        """The number of heads with a nonzero weight; without any, the order of pairs is random."""
        return int(np.count_nonzero(self.weights_H))

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for `from_dict`."""
        return {
            "seed": self.seed,
            "weights": self.weights_H.tolist(),
            "intercept": self.intercept,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ContactRegression":
        """Creates the regression from the values of `to_dict`.

        Raises:
            ValueError: a weight or the intercept is not finite.
        """
        regression = cls(seed=int(values["seed"]))
        regression.weights_H = np.array(values["weights"], dtype=np.float64)
        regression.intercept = float(values["intercept"])
        if not np.isfinite([*regression.weights_H, regression.intercept]).all():
            raise ValueError("a weight is not finite")
        return regression


class HasSequence(Protocol):
    """A protein: a name and letters."""

    @property
    def identifier(self) -> str:
        """The name."""
        ...

    @property
    def sequence(self) -> str:
        """The letters."""
        ...


def check_disjoint(fit: Sequence[HasSequence], test: Sequence[HasSequence]) -> None:
    """Raises `InputDataError` if a sequence is in the fit and in the test."""
    fitted = {protein.sequence: protein.identifier for protein in fit}
    for protein in test:
        if protein.sequence in fitted:
            raise InputDataError(
                f"{protein.identifier} of the test has the sequence of {fitted[protein.sequence]} "
                "of the fit: fit to other proteins than those of the test"
            )


def _pairs(features_HLL: np.ndarray, contacts_LL: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows, columns = np.triu_indices(len(contacts_LL), MIN_SEPARATION)
    known = contacts_LL[rows, columns] >= 0
    rows, columns = rows[known], columns[known]
    return features_HLL[:, rows, columns].T, contacts_LL[rows, columns]
