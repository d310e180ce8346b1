"""Three-state secondary structure by a linear probe on residue embeddings.

Labels are computed from coordinates (`dssp.py`). Baselines are the same architecture with random
weights, a window of residues without a model, and the most common state.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import numpy as np

from protlm.analysis.probes import Examples, class_scores, probe
from protlm.analysis.residue_states import (
    groups,
    residue_embeddings,
    residue_examples,
    resolved,
    state_labels,
)
from protlm.analysis.structures import Structure, read_structure, structure_files
from protlm.data.vocabulary import VOCABULARY
from protlm.errors import InputDataError
from protlm.evaluation.base import NO_SPLIT, Evaluation, EvaluationData, ResultTable
from protlm.model.pretrained import PretrainedModel
from protlm.paths import sample_dir

# Residues on either side in the window of the baseline.
_FLANK = 8


@final
class SecondaryStructure(Evaluation):
    """Q3: the fraction of residues whose state (helix, strand, coil) a linear probe predicts.

    Args:
        structures: the folder of test structures; `sample` is the shipped one.
        fit_structures: the folder of structures to fit to; `sample` is the shipped one. It should
            have no homologs of the test structures.
        seed: seed of random weights, held-out proteins and bootstrap.
    """

    needs_data = False

    def __init__(
        self, *, structures: str = "sample", fit_structures: str = "sample", seed: int = 0
    ) -> None:
        shipped = sample_dir() / "structures"
        self.test_dir = shipped / "test" if structures == "sample" else Path(structures)
        self.fit_dir = shipped / "fit" if fit_structures == "sample" else Path(fit_structures)
        self.seed = seed

    def run(self, model: PretrainedModel, data: EvaluationData | None) -> dict[str, Any]:
        """Returns accuracy (Q3) and macro-F1 with 95 % intervals over proteins, by predictor.

        Raises:
            InputDataError: a folder or structure cannot be used, or a protein is in both folders.
        """
        limit = model.max_residues
        fit, test = (_read(folder, limit) for folder in (self.fit_dir, self.test_dir))
        if both := {s.sequence for s in fit} & {s.sequence for s in test}:
            name = next(s.identifier for s in test if s.sequence in both)
            raise InputDataError(
                f"{name} is in {self.fit_dir} and in {self.test_dir}: fit to other proteins than "
                "those of the test"
            )
        result: dict[str, Any] = {}
        compared = {"model": model, "random_weights": model.with_random_weights(self.seed)}
        for who, one in compared.items():
            sides = (residue_examples(side, residue_embeddings(one, side)) for side in (fit, test))
            result[who] = self._scored(*sides)
        windows = (residue_examples(side, [_windows(side)]) for side in (fit, test))
        result["residues_around"] = self._scored(*windows)
        labels, proteins = state_labels(test), groups(test)
        most_common = np.bincount(state_labels(fit)).argmax()
        chosen = np.full_like(labels, most_common)
        result["constant"] = class_scores(chosen, labels, proteins, seed=self.seed)
        residues = {"num_fit_residues": len(state_labels(fit)), "num_test_residues": len(labels)}
        return result | {"num_fit": len(fit), "num_test": len(test)} | residues

    def table(self, results: Mapping[str, dict[str, Any]]) -> ResultTable:
        """Builds a row for each predictor."""
        values = results[NO_SPLIT]
        rows = []
        for who in ("model", "random_weights", "residues_around", "constant"):
            q3, f1 = values[who]["accuracy"], values[who]["macro_f1"]
            interval = f"{q3['low']:.1%} to {q3['high']:.1%}"
            layer = str(values[who].get("layer", ""))
            proteins = str(values["num_test"])
            rows.append(
                (who, f"{q3['value']:.1%}", interval, f"{f1['value']:.3f}", layer, proteins)
            )
        columns = ("secondary structure", "Q3", "95 %", "macro-F1", "layer", "proteins")
        return ResultTable(columns, rows)

    def _scored(self, fit: Examples, test: Examples) -> dict[str, Any]:
        found = probe(fit, test, seed=self.seed)
        scores = class_scores(found.predicted, test.labels, test.groups, seed=self.seed)
        return {**scores, "layer": found.layer, "inverse_penalty": found.inverse_penalty}


def _read(directory: Path, max_residues: int | None) -> list[Structure]:
    structures = [read_structure(path) for path in structure_files(directory)]
    short = [s for s in structures if max_residues is None or len(s) <= max_residues]
    if not short:
        raise InputDataError(f"{directory} has no structure of a length that the model accepts")
    return short


def _windows(structures: list[Structure]) -> np.ndarray:
    """Returns one-hot letters of each resolved residue and eight on either side, float32."""
    rows = []
    for structure in structures:
        tokens = VOCABULARY.encode(structure.sequence).astype(np.int64) - VOCABULARY.residues[0]
        one_hot = np.eye(len(VOCABULARY.residues), dtype=np.float32)[tokens]
        padded = np.pad(one_hot, ((_FLANK, _FLANK), (0, 0)))
        length = len(tokens)
        shifted = [padded[shift : shift + length] for shift in range(2 * _FLANK + 1)]
        rows.append(np.concatenate(shifted, axis=1)[resolved(structure)])
    return np.concatenate(rows)
