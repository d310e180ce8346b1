"""Three-state secondary structure by a linear probe on residue embeddings.

Labels are computed from coordinates. The probe and its baselines are those of `protlm probe`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import numpy as np

from protlm.analysis.structures import Structure, read_structure, structure_files
from protlm.downstream.probing import ProbeOptions, metric_rows, probe
from protlm.downstream.residue_states import state_targets
from protlm.errors import InputDataError
from protlm.evaluation.base import NO_SPLIT, Evaluation, EvaluationData, ResultTable
from protlm.model.pretrained import PretrainedModel
from protlm.paths import sample_dir


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
        """Returns accuracy (Q3) and other metrics with 95 % intervals over proteins, by predictor.

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
        sequences, targets, split = state_targets(fit, test)
        found = probe(model, sequences, targets, split, ProbeOptions(seed=self.seed))
        of_test = int(np.isin(targets.groups, split.test).sum())
        return {
            "predictors": {name: one.plain() for name, one in found.items()},
            "proteins": {"train": len(fit), "test": len(test)},
            "residues": {"train": len(targets.values) - of_test, "test": of_test},
        }

    def table(self, results: Mapping[str, dict[str, Any]]) -> ResultTable:
        """Builds a row for each predictor."""
        values = results[NO_SPLIT]
        headings, *rows = metric_rows(values["predictors"])
        counts = f"{values['proteins']['test']} proteins, {values['residues']['test']:,} residues"
        return ResultTable(["secondary structure by", *headings[1:]], rows, counts)


def _read(directory: Path, max_residues: int | None) -> list[Structure]:
    structures = [read_structure(path) for path in structure_files(directory)]
    short = [s for s in structures if max_residues is None or len(s) <= max_residues]
    if not short:
        raise InputDataError(f"{directory} has no structure of a length that the model accepts")
    return short
