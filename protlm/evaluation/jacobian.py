"""Contacts from the categorical Jacobian of a model (`analysis.categorical_jacobian`)."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

import numpy as np

from protlm.analysis.bootstrap import MODEL, RANDOM
from protlm.analysis.categorical_jacobian import jacobian_contacts
from protlm.analysis.precision import (
    COLUMNS,
    DEFINITION,
    NEAREST,
    caption,
    group_scores,
    nearest_in_sequence,
    precisions,
    read_groups,
    table_rows,
)
from protlm.analysis.structures import (
    Structure,
    check_limit,
    contact_map,
    longest_read,
    read_folder,
    structures_folder,
)
from protlm.evaluation.base import NO_SPLIT, Evaluation, EvaluationData, ResultTable, compared
from protlm.model.pretrained import PretrainedModel
from protlm.system.terminal import watched


@final
class Jacobian(Evaluation):
    """Precision of contacts by the categorical Jacobian, beside that of random weights.

    Nothing is fitted. It takes 20 passes for each residue. The third predictor is the pairs that
    are nearest in the sequence. Long structures are excluded as in `Contacts`.
    """

    needs_data = False

    def __init__(
        self,
        *,
        structures: str = "sample",
        max_residues: int = 200,
        seed: int = 0,
        bfloat16: bool = False,
        groups: str | None = None,
    ) -> None:
        check_limit("max_residues", max_residues)
        self.structures = structures_folder(structures)
        self.max_residues, self.seed, self.bfloat16 = max_residues, seed, bfloat16
        self.groups = None if groups is None else Path(groups)

    def run(self, model: PretrainedModel, data: EvaluationData | None) -> dict[str, Any]:
        """Returns the `group_scores` of the predictors, and the number of structures."""
        limit = longest_read(model, self.max_residues)
        structures, too_long = read_folder(self.structures, limit)
        group_of = read_groups(self.groups, structures)
        found = {
            who: precisions(self._predicted(one, structures))
            for who, one in compared(model, self.seed).items()
        }
        found[NEAREST] = precisions(nearest_in_sequence(structures))
        return {
            **group_scores(found, group_of, seed=self.seed),
            "num_test": len(structures),
            "max_residues": limit,
            "left_out": too_long,
            "definition": DEFINITION,
        }

    def table(self, results: Mapping[str, dict[str, Any]]) -> ResultTable:
        values = results[NO_SPLIT]
        rows = table_rows(values, (MODEL, RANDOM, NEAREST))
        return ResultTable(("Jacobian", *COLUMNS), rows, caption(values))

    def _predicted(
        self, model: PretrainedModel, structures: list[Structure]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for structure in watched("Jacobians", structures):
            found_LL = jacobian_contacts(model, structure.sequence, bfloat16=self.bfloat16)
            yield found_LL, contact_map(structure)
