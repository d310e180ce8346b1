"""Three-state secondary structure by a linear probe on residue embeddings.

Labels are computed from coordinates. The probe and its baselines are those of `protlm probe`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import numpy as np

from protlm.analysis.contact_regression import check_disjoint
from protlm.analysis.structures import Structure, read_folder, structures_folder
from protlm.downstream.labels import UNLABELED
from protlm.downstream.probe_results import comparison, metric_rows, scores_of
from protlm.downstream.probing import probe
from protlm.downstream.tasks import state_labels, state_targets
from protlm.evaluation.base import NO_SPLIT, Evaluation, EvaluationData, ResultTable
from protlm.model.pretrained import PretrainedModel
from protlm.options.labels import ProbeOptions
from protlm.system.errors import InputDataError


@final
class SecondaryStructure(Evaluation):
    """Q3: the fraction of residues whose state (helix, strand, coil) a linear probe predicts.

    The structures to fit to should have no homologs of the test structures.
    """

    needs_data = False

    def __init__(
        self, *, structures: str = "sample", fit_structures: str = "sample", seed: int = 0
    ) -> None:
        self.test_dir = structures_folder(structures)
        self.fit_dir = structures_folder(fit_structures, "fit")
        self.seed = seed

    def run(self, model: PretrainedModel, data: EvaluationData | None) -> dict[str, Any]:
        """Returns accuracy (Q3) and other metrics with 95 % intervals, by predictor."""
        fit, not_fit = _read(self.fit_dir, model.max_residues)
        test, not_tested = _read(self.test_dir, model.max_residues)
        check_disjoint(fit, test)
        sequences, targets, split = state_targets(fit, test)
        found = probe(model, sequences, targets, split, ProbeOptions(seed=self.seed))
        of_test = int(np.isin(targets.groups, split.test).sum())
        return {
            **scores_of(found, targets.task),
            "proteins": {"train": len(fit), "test": len(test)},
            "residues": {"train": len(targets.values) - of_test, "test": of_test},
            "left_out": not_fit + not_tested,
        }

    def table(self, results: Mapping[str, dict[str, Any]]) -> ResultTable:
        values = results[NO_SPLIT]
        headings, *rows = metric_rows(values, "secondary structure by")
        proteins, residues = values["proteins"]["test"], values["residues"]["test"]
        lines = [f"{proteins} proteins, {residues:,} residues; {comparison(values)}"]
        if left_out := values["left_out"]:
            lines.append(f"left out, too long or without a backbone: {', '.join(left_out)}")
        return ResultTable(headings, rows, "\n".join(lines))


def _read(directory: Path, max_residues: int | None) -> tuple[list[Structure], list[str]]:
    found, left_out = read_folder(directory, max_residues)
    resolved = [structure for structure in found if state_labels(structure).strip(UNLABELED)]
    if not resolved:
        raise InputDataError(
            f"{directory} has no structure with a complete residue (N, CA, C and O); give others"
        )
    kept = {structure.identifier for structure in resolved}
    return resolved, left_out + [s.identifier for s in found if s.identifier not in kept]
