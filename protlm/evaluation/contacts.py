"""Contacts from attention maps: a sparse logistic regression over all heads.

Rao et al. 2020 (doi:10.1101/2020.12.15.422761): every map is symmetrized and corrected by the
average product (APC, Dunn et al. 2008); the regression is fitted to a few proteins of known
structure and scored by the precision of the L most probable pairs (P@L) of other proteins.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, final

import numpy as np

from protlm.errors import InputDataError, UserError
from protlm.evaluation.base import NO_SPLIT, Evaluation, EvaluationData, ResultTable
from protlm.evaluation.precision import DIVISORS
from protlm.evaluation.structure_groups import (
    by_predictor,
    read_groups,
    scores_by_group,
    table_rows,
)
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
            solver="liblinear", l1_ratio=1.0, C=_INVERSE_PENALTY, random_state=self.seed
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
        """Creates the regression from the values of `to_dict`."""
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
    """Precision of contacts from attention maps, beside that of random weights.

    For both, the maps are used by a fitted regression and without a fit, by their mean over heads.

    Args:
        structures: the folder of test structures; `sample` is the shipped one.
        fit_structures: the folder of structures to fit to; `sample` is the shipped one.
        max_residues: longer structures are excluded and listed, as are those longer than the
            model accepts.
        seed: seed of random weights, solver and bootstrap.
        groups: a tab-separated table with the columns structure and group; adds figures by group,
            for instance with and without homologs in training.
        scaled: as for `ContactRegression`.
    """

    needs_data = False

    def __init__(
        self,
        *,
        structures: str,
        fit_structures: str,
        max_residues: int = 400,
        seed: int = 0,
        groups: str | None = None,
        scaled: bool = True,
    ) -> None:
        if max_residues < 1:
            raise UserError(f"max_residues={max_residues} excludes every structure; give 1 or more")
        shipped = sample_dir() / "structures"
        self.test_dir = shipped / "test" if structures == "sample" else Path(structures)
        self.fit_dir = shipped / "fit" if fit_structures == "sample" else Path(fit_structures)
        self.max_residues = max_residues
        self.seed = seed
        self.groups = None if groups is None else Path(groups)
        self.scaled = scaled

    def run(self, model: PretrainedModel, data: EvaluationData | None) -> dict[str, Any]:
        """Returns `scores` of each predictor, and the number of structures.

        `heads_used` counts the heads with a nonzero weight in each regression; `left_out` lists
        structures longer than `max_residues`.

        Raises:
            InputDataError: a folder or structure cannot be used, or a protein is in both folders.
        """
        limit = self.max_residues
        if model.max_residues is not None:
            limit = min(limit, model.max_residues)
        fit, too_long_to_fit = read_folder(self.fit_dir, limit)
        test, too_long_to_test = read_folder(self.test_dir, limit)
        self._check_disjoint(fit, test)
        group_of = read_groups(self.groups, test)
        figures: dict[str, Any] = {}
        heads_used: dict[str, int] = {}
        for who, compared in (
            ("model", model),
            ("random_weights", model.with_random_weights(self.seed)),
        ):
            regression = ContactRegression(seed=self.seed, scaled=self.scaled)
            regression.fit(_examples(compared, fit))
            heads_used[who] = regression.num_heads_used
            fitted, mean = [], []
            for features_HLL, contacts_LL in _examples(compared, test):
                fitted.append((regression.predict(features_HLL), contacts_LL))
                mean.append((features_HLL.mean(axis=0), contacts_LL))
            figures[who] = scores_by_group(fitted, group_of, seed=self.seed)
            figures[f"{who}_mean_of_heads"] = scores_by_group(mean, group_of, seed=self.seed)
        return {
            **by_predictor(figures),
            "heads_used": heads_used,
            "scaled": self.scaled,
            "inverse_penalty": _INVERSE_PENALTY,
            "num_fit": len(fit),
            "num_test": len(test),
            "max_residues": limit,
            "left_out": too_long_to_fit + too_long_to_test,
            "definition": DEFINITION,
        }

    def table(self, results: Mapping[str, dict[str, Any]]) -> ResultTable:
        """Builds a row for each predictor and range, and for each group."""
        values = results[NO_SPLIT]
        used = values["heads_used"]
        # Without a head all pairs are equally probable, and their order is random.
        heads = {who: str(used[who] or "0: chance") for who in used}
        heads |= {f"{who}_mean_of_heads": "all" for who in used}
        rows = [(*row, heads[row[0].split(",")[0]]) for row in table_rows(values, list(heads))]
        return ResultTable(("contacts", "range", *DIVISORS, "proteins", "heads used"), rows)

    def _check_disjoint(self, fit: list[Structure], test: list[Structure]) -> None:
        fitted = {structure.sequence: structure.identifier for structure in fit}
        for structure in test:
            if structure.sequence in fitted:
                raise InputDataError(
                    f"{structure.identifier} of {self.test_dir} has the sequence of "
                    f"{fitted[structure.sequence]} of {self.fit_dir}: fit to other proteins than "
                    "those of the test"
                )


def _examples(
    model: PretrainedModel, structures: list[Structure]
) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    # The maps of one protein at a time, because all of them may not fit in memory.
    for structure in structures:
        yield head_features(model, structure.sequence), contact_map(structure)


def read_folder(directory: Path, max_residues: int) -> tuple[list[Structure], list[str]]:
    """Returns the structures of a folder, and the names of those that are too long."""
    structures = [read_structure(path) for path in structure_files(directory)]
    short = [structure for structure in structures if len(structure) <= max_residues]
    if not short:
        raise InputDataError(
            f"{directory} has no structure of at most {max_residues} residues; "
            "give shorter ones or raise max_residues"
        )
    return short, [s.identifier for s in structures if len(s) > max_residues]
