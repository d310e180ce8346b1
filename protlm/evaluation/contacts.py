"""Contacts from attention maps: a sparse logistic regression over all heads.

Rao et al. 2020 (doi:10.1101/2020.12.15.422761): every map is symmetrised and corrected by the
average product (APC, Dunn et al. 2008); the regression is fitted on a few proteins of known
structure and judged by the precision of the L most probable pairs (P@L) of other proteins.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, final

import numpy as np

from protlm.errors import InputDataError, UserError
from protlm.evaluation.base import Evaluation, EvaluationData
from protlm.evaluation.precision import scores
from protlm.evaluation.structures import Structure, contact_map, read_structure, structure_files
from protlm.model.pretrained import PretrainedModel
from protlm.paths import sample_dir

MIN_SEPARATION = 6
DEFINITION = (
    "contact: Cβ-Cβ < 8 Å, Cβ imputed where it is missing; separations: short 6 to 11, "
    "medium 12 to 23, long 24 and more; mean over proteins, 95 % bootstrap interval"
)
# The strength of the L1 penalty in Rao et al. 2020.
_INVERSE_PENALTY = 0.15


def symmetrise(maps: np.ndarray) -> np.ndarray:
    """Adds each map to its transpose, [..., L, L].

    >>> symmetrise(np.array([[1.0, 2.0], [0.0, 3.0]])).tolist()
    [[2.0, 2.0], [2.0, 6.0]]
    """
    return maps + np.swapaxes(maps, -1, -2)


def apc(maps: np.ndarray) -> np.ndarray:
    """Subtracts what row and column sums explain, F_ij - F_i· F_·j / F_··, from each [..., L, L].

    A map whose entries sum to 0 has nothing to be explained by and is returned as it is.
    """
    rows = maps.sum(axis=-1, keepdims=True)
    columns = maps.sum(axis=-2, keepdims=True)
    totals = maps.sum(axis=(-1, -2), keepdims=True)
    return maps - rows * columns / np.where(totals == 0, np.inf, totals)


def features(maps_NHLL: np.ndarray) -> np.ndarray:
    """What the regression sees of each pair: symmetrised, corrected maps, float32 [N·H, L, L].

    Args:
        maps_NHLL: maps of all layers and heads over residues only, special tokens cut off.
    """
    corrected_NHLL = apc(symmetrise(maps_NHLL.astype(np.float64)))
    return corrected_NHLL.astype(np.float32).reshape(-1, *maps_NHLL.shape[-2:])


def head_features(model: PretrainedModel, sequence: str) -> np.ndarray:
    """The `features` of one protein, [N·H, L, L], heads of the first layer first.

    Raises:
        InputDataError: a letter is no residue.
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
    """L1-penalised logistic regression from heads to contacts, over pairs 6 or more apart.

    H in its suffixes counts the heads of all layers together.

    Args:
        seed: what the solver's order of coordinates is drawn from.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed
        self.weights_H = np.zeros(0)
        self.intercept = 0.0

    def fit(self, examples: Iterable[tuple[np.ndarray, np.ndarray]]) -> "ContactRegression":
        """Fits to proteins, each `features` and its contact map; unresolved pairs are left out.

        Raises:
            InputDataError: the examples hold no contact, or nothing but contacts.
        """
        from sklearn.linear_model import LogisticRegression

        pairs = [_pairs(features_HLL, contacts_LL) for features_HLL, contacts_LL in examples]
        labels = np.concatenate([label for _, label in pairs]) if pairs else np.zeros(0)
        if len(np.unique(labels)) < 2:
            raise InputDataError(
                "the structures to fit on hold no contact, or nothing but contacts, between "
                f"residues {MIN_SEPARATION} or more apart; give more structures"
            )
        # As in the paper pairs are neither balanced nor scaled, few as the contacts among them are.
        solver = LogisticRegression(
            solver="liblinear", l1_ratio=1.0, C=_INVERSE_PENALTY, random_state=self.seed
        )
        solver.fit(np.concatenate([values for values, _ in pairs]), labels)
        self.weights_H = solver.coef_[0].astype(np.float64)
        self.intercept = float(np.ravel(solver.intercept_)[0])
        return self

    def predict(self, features_HLL: np.ndarray) -> np.ndarray:
        """Contact probabilities, float64 LL, of every pair, also of those nearer than 6."""
        assert len(self.weights_H) == len(features_HLL), "fitted on other heads, or not at all"
        logits_LL = np.tensordot(self.weights_H, features_HLL, axes=1) + self.intercept
        return 0.5 * (1.0 + np.tanh(0.5 * logits_LL))

    @property
    def num_heads_used(self) -> int:
        """Heads with a weight other than 0; where it is 0 the order of pairs is chance."""
        return int(np.count_nonzero(self.weights_H))

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `from_dict` reads."""
        return {
            "seed": self.seed,
            "weights": self.weights_H.tolist(),
            "intercept": self.intercept,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ContactRegression":
        """The regression `to_dict` described."""
        regression = cls(seed=int(values["seed"]))
        regression.weights_H = np.array(values["weights"], dtype=np.float64)
        regression.intercept = float(values["intercept"])
        return regression


def _pairs(features_HLL: np.ndarray, contacts_LL: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows, columns = np.triu_indices(len(contacts_LL), MIN_SEPARATION)
    known = contacts_LL[rows, columns] >= 0
    rows, columns = rows[known], columns[known]
    return features_HLL[:, rows, columns].T, contacts_LL[rows, columns]


class Contacts(Evaluation):
    """Precision of contacts regressed from attention maps, beside that of random weights.

    Args:
        structures: the folder of structures to judge by; `sample` is the shipped one.
        fit_structures: the folder of structures to fit on; `sample` is the shipped one.
        max_residues: longer structures are left out and listed, and so are those longer than the
            model takes.
        seed: what random weights, solver and bootstrap are drawn from.
    """

    needs_data = False

    def __init__(
        self, *, structures: str, fit_structures: str, max_residues: int = 400, seed: int = 0
    ) -> None:
        if max_residues < 1:
            raise UserError(f"max_residues={max_residues} leaves no structure; give 1 or more")
        shipped = sample_dir() / "structures"
        self.test_dir = shipped / "test" if structures == "sample" else Path(structures)
        self.fit_dir = shipped / "fit" if fit_structures == "sample" else Path(fit_structures)
        self.max_residues = max_residues
        self.seed = seed

    def run(self, model: PretrainedModel, data: EvaluationData | None) -> dict[str, Any]:
        """Returns `scores` of the model and of random weights, and what they were computed on.

        `heads_used` counts the heads each regression gave a weight; `left_out` lists structures
        longer than `max_residues`.

        Raises:
            InputDataError: a folder or structure cannot be used, or a protein is in both folders.
        """
        limit = self.max_residues
        if model.max_length is not None:
            limit = min(limit, model.max_length - 2)
        fit, too_long_to_fit = _read_folder(self.fit_dir, limit)
        test, too_long_to_test = _read_folder(self.test_dir, limit)
        self._check_disjoint(fit, test)
        compared = {"model": model, "random_weights": model.randomised(self.seed)}
        regressions = {
            who: ContactRegression(seed=self.seed).fit(_examples(judged, fit))
            for who, judged in compared.items()
        }
        return {
            **{who: self._scores(compared[who], regressions[who], test) for who in compared},
            "heads_used": {who: fitted.num_heads_used for who, fitted in regressions.items()},
            "num_fit": len(fit),
            "num_test": len(test),
            "max_residues": limit,
            "left_out": too_long_to_fit + too_long_to_test,
            "definition": DEFINITION,
        }

    def _check_disjoint(self, fit: list[Structure], test: list[Structure]) -> None:
        fitted = {structure.sequence: structure.identifier for structure in fit}
        for structure in test:
            if structure.sequence in fitted:
                raise InputDataError(
                    f"{structure.identifier} of {self.test_dir} has the sequence of "
                    f"{fitted[structure.sequence]} of {self.fit_dir}: fit on other proteins than "
                    "those to judge by"
                )

    def _scores(
        self, model: PretrainedModel, regression: ContactRegression, test: list[Structure]
    ) -> dict[str, Any]:
        predicted = [
            (regression.predict(features_HLL), contacts_LL)
            for features_HLL, contacts_LL in _examples(model, test)
        ]
        return scores(predicted, seed=self.seed)


def _examples(
    model: PretrainedModel, structures: list[Structure]
) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    # One protein's maps at a time: all of them together need not fit in memory.
    for structure in structures:
        yield head_features(model, structure.sequence), contact_map(structure)


def _read_folder(directory: Path, max_residues: int) -> tuple[list[Structure], list[str]]:
    """The structures of a folder, and the names of those that are too long."""
    structures = [read_structure(path) for path in structure_files(directory)]
    short = [structure for structure in structures if len(structure) <= max_residues]
    if not short:
        raise InputDataError(
            f"{directory} holds no structure of at most {max_residues} residues; "
            "give shorter ones or raise max_residues"
        )
    return short, [s.identifier for s in structures if len(s) > max_residues]
