"""Contacts from attention maps: a sparse logistic regression over all heads.

Rao et al. 2020 (doi:10.1101/2020.12.15.422761): every map is symmetrized and corrected by the
average product (APC, Dunn et al. 2008), and the regression is fitted to a few proteins of known
structure.
"""

import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np

from protlm.analysis.head_statistics import residue_rows
from protlm.analysis.precision import MIN_SEPARATION
from protlm.analysis.structures import (
    Protein,
    Structure,
    contact_map,
    read_folder,
    structures_folder,
)
from protlm.model.contexts import NetworkInContext
from protlm.model.pretrained import PretrainedModel
from protlm.system.errors import InputDataError, UserError
from protlm.system.json_file import from_json, read_json
from protlm.system.terminal import watched

# The strength of the L1 penalty in Rao et al. 2020.
INVERSE_PENALTY = 0.15
# Maps are float32; the correction adds up their errors.
_ROUNDING = 8 * float(np.finfo(np.float32).eps)
# Rows of a map that are in memory in float64.
_ROWS = 128
# Of the logits and what is computed from them, beside the maps of a layer.
BYTES_PER_PAIR = 32


def apc(maps: np.ndarray) -> np.ndarray:
    """Applies the average product correction, F_ij - F_i· F_·j / F_··, to each map [..., L, L].

    A map whose entries sum to 0 is returned unchanged.
    """
    rows = maps.sum(axis=-1, keepdims=True)
    columns = maps.sum(axis=-2, keepdims=True)
    totals = maps.sum(axis=(-1, -2), keepdims=True)
    return maps - rows * columns / np.where(totals == 0, np.inf, totals)


def features(maps: np.ndarray) -> np.ndarray:
    """Returns the inputs of the regression: symmetrized, corrected maps, float32 [heads, L, L].

    The maps, [..., L, L], have no special tokens. Values within their rounding become 0, so that a
    uniform map has no features.
    """
    maps = maps.reshape(-1, *maps.shape[-2:])
    found, length = np.empty(maps.shape, np.float32), maps.shape[-1]
    blocks = [slice(start, start + _ROWS) for start in range(0, length, _ROWS)]

    def symmetric(map_LL: np.ndarray, rows: slice) -> np.ndarray:
        return map_LL[rows].astype(np.float64) + map_LL[:, rows].T

    for map_LL, feature_LL in zip(maps, found, strict=True):
        sums_L, largest = np.empty(length), 0.0
        for rows in blocks:
            part = symmetric(map_LL, rows)
            sums_L[rows], largest = part.sum(axis=1), max(largest, np.abs(part).max())
        # A symmetric map has the sums of its rows in its columns, too.
        total = sums_L.sum() or np.inf
        for rows in blocks:
            corrected_ML = symmetric(map_LL, rows) - np.multiply.outer(sums_L[rows], sums_L) / total
            corrected_ML[np.abs(corrected_ML) < _ROUNDING * largest] = 0.0
            feature_LL[rows] = corrected_ML
    return found


def head_features(model: PretrainedModel, sequence: str) -> np.ndarray:
    """Returns the `features` of one protein, [N·H, L, L], heads of the first layer first."""
    return np.stack([feature_LL for _, feature_LL in _each_head(model, sequence)])


def examples(
    model: PretrainedModel, structures: Iterable[Structure]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Returns the `head_features` and contact map of each structure, one at a time in memory."""
    return ((head_features(model, one.sequence), contact_map(one)) for one in structures)


def _each_head(
    model: PretrainedModel, sequence: str, used_H: np.ndarray | None = None
) -> Iterator[tuple[int, np.ndarray]]:
    heads, length = model.num_heads, len(sequence)
    used = np.ones(model.num_layers * heads) if used_H is None else used_H
    layers = [n for n in range(1, model.num_layers + 1) if used[(n - 1) * heads : n * heads].any()]
    maps_HLL = np.empty((heads, length, length), np.float32)
    is_in_context = isinstance(model.network, NetworkInContext)
    for layer, blocks in residue_rows(model, sequence, layers):
        start = 0
        for rows in blocks:
            end = start + rows.shape[1]
            # What the protein has of a row, beside relatives.
            own = rows.sum(-1, keepdim=True).clamp(min=_ROUNDING) if is_in_context else 1
            maps_HLL[:, start:end] = (
                (rows / own)[:, :, model.vocabulary.inner].float().cpu().numpy()
            )
            start = end
        for head in np.flatnonzero(used[(layer - 1) * heads : layer * heads]).tolist():
            yield (layer - 1) * heads + head, features(maps_HLL[head])[0]


@final
class ContactRegression:
    """L1-penalized logistic regression from heads to contacts, over pairs 6 or more apart.

    H in its suffixes counts the heads of all layers. If scaled, the features of each head are
    divided by their standard deviation before the fit. In the paper they are not; then the penalty
    removes every head whose maps are nearly flat, as those of linear attention are.
    """

    def __init__(self, *, seed: int = 0, scaled: bool = True) -> None:
        self.seed = seed
        self.scaled = scaled
        self.weights_H = np.zeros(0)
        self.intercept = 0.0

    def fit(self, examples: Iterable[tuple[np.ndarray, np.ndarray]]) -> "ContactRegression":
        """Fits to pairs of `features` and contact map, one a protein; ignores unresolved pairs."""
        from sklearn.linear_model import LogisticRegression

        pairs = []
        for features_HLL, contacts_LL in examples:
            rows, columns = np.triu_indices(len(contacts_LL), MIN_SEPARATION)
            known = contacts_LL[rows, columns] >= 0
            rows, columns = rows[known], columns[known]
            pairs.append((features_HLL[:, rows, columns].T, contacts_LL[rows, columns]))
        labels = np.concatenate([label for _, label in pairs]) if pairs else np.zeros(0)
        if len(np.unique(labels)) < 2:
            raise InputDataError(
                "the structures to fit to have no contacts, or only contacts, between "
                f"residues {MIN_SEPARATION} or more apart; give more structures"
            )
        values = np.concatenate([values for values, _ in pairs])
        spread_H = values.std(axis=0, dtype=np.float64) if self.scaled else np.ones(values.shape[1])
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
        return self._probabilities(np.tensordot(self.weights_H, features_HLL, axes=1))

    def predict_protein(self, model: PretrainedModel, sequence: str) -> np.ndarray:
        """Returns what `predict` returns of `head_features`, with the maps of one layer at a time.

        It needs `BYTES_PER_PAIR` and 4 bytes a head for each pair of residues.
        """
        assert len(self.weights_H) == model.num_layers * model.num_heads, "fitted on other heads"
        logits_LL = np.zeros((len(sequence), len(sequence)))
        for head, feature_LL in _each_head(model, sequence, self.weights_H):
            logits_LL += self.weights_H[head] * feature_LL
        return self._probabilities(logits_LL)

    def predict_averaged(self, models: Sequence[PretrainedModel], sequence: str) -> np.ndarray:
        """Returns the mean of what `predict_protein` returns of each model, as of contexts."""
        return np.mean([self.predict_protein(model, sequence) for model in models], axis=0)

    def _probabilities(self, logits_LL: np.ndarray) -> np.ndarray:
        return 0.5 * (1.0 + np.tanh(0.5 * (logits_LL + self.intercept)))

    @property
    def num_heads_used(self) -> int:
        """The number of heads with a nonzero weight; without any, the order of pairs is random."""
        return int(np.count_nonzero(self.weights_H))


def check_disjoint(fit: Sequence[Structure | Protein], test: Sequence[Structure | Protein]) -> None:
    """Raises `InputDataError` if a sequence is in the fit and in the test."""
    fitted = {protein.sequence: protein.identifier for protein in fit}
    for protein in test:
        if protein.sequence in fitted:
            raise InputDataError(
                f"{protein.identifier} of the test has the sequence of {fitted[protein.sequence]} "
                "of the fit: fit to other proteins than those of the test"
            )


@dataclass(frozen=True)
class SavedFit:
    """A regression on the heads of a model, with the hashes of its weights and of the proteins."""

    model_hash: str
    seed: int
    weights: list[float]
    intercept: float
    fitted_to: list[str] | None = None

    @property
    def regression(self) -> ContactRegression:
        """The regression, as it was fitted."""
        found = ContactRegression(seed=self.seed)
        found.weights_H, found.intercept = np.array(self.weights), self.intercept
        return found


def digest(sequence: str) -> str:
    """Returns the SHA-256 of a sequence, in hexadecimal."""
    return hashlib.sha256(sequence.encode()).hexdigest()


def read_fit(path: Path) -> SavedFit:
    """Reads a fit."""
    try:
        return from_json(SavedFit, read_json(path, "a saved fit"))
    except ValueError as error:
        raise InputDataError(
            f"{path} is not a fit that protlm contacts saved ({error}); give a NAME.fit.json file, "
            "or a folder of structures"
        ) from error


def fit_contacts(model: PretrainedModel, given: Path | None) -> SavedFit:
    """Returns a saved fit, or fits to a folder of structures; None is the shipped ones."""
    if given is not None and given.is_file():
        fit = read_fit(given)
        if fit.model_hash != model.hash:
            raise UserError(
                f"{given} was fitted with another model, and without it this one is fitted",
                {"fit": None},
            )
        return fit
    folder, longest = given or structures_folder("sample", "fit"), model.max_residues
    structures, lost = read_folder(folder, longest)
    if lost:
        print(
            f"{len(lost)} of {len(lost) + len(structures)} structures to fit to have over "
            f"{longest:,} residues, and are left out",
            file=sys.stderr,
        )
    fitted = ContactRegression().fit(examples(model, watched("structures fitted", structures)))
    fitted_to = sorted(digest(one.sequence) for one in structures)
    return SavedFit(model.hash, 0, fitted.weights_H.tolist(), fitted.intercept, fitted_to)
