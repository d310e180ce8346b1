"""Contacts from the categorical Jacobian of a model, which needs no attention maps.

Zhang et al. 2024 (doi:10.1073/pnas.2406285121): J[i, a, j, b] is the change of the logit of amino
acid b at position j when position i is replaced by a, with nothing masked. J is centered over each
of its four axes and symmetrized; its norm over a and b, corrected by the average product, measures
the dependence of two positions.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

import numpy as np

from protlm.analysis.categorical_jacobian import jacobian_contacts
from protlm.analysis.precision import DEFINITION, precisions
from protlm.analysis.structure_groups import (
    COLUMNS,
    NEAREST,
    caption,
    group_scores,
    nearest_in_sequence,
    read_groups,
    table_rows,
)
from protlm.analysis.structures import Structure, contact_map, read_folder
from protlm.evaluation.base import NO_SPLIT, Evaluation, EvaluationData, ResultTable
from protlm.model.pretrained import PretrainedModel
from protlm.system.errors import UserError
from protlm.system.paths import sample_dir
from protlm.system.terminal import JobProgress


@final
class Jacobian(Evaluation):
    """Precision of contacts by the categorical Jacobian, beside that of random weights.

    Nothing is fitted. It takes 20 passes for each residue. The third predictor is the pairs that
    are nearest in the sequence.

    Args:
        structures: the folder of test structures; `sample` is the shipped one.
        max_residues: longer structures are excluded and listed, as are those longer than the
            model accepts.
        seed: seed of random weights and bootstrap.
        bfloat16: as for `jacobian_contacts`.
        groups: a tab-separated table with the columns structure and group; adds figures by group.
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
        if max_residues < 1:
            raise UserError(f"max_residues={max_residues} excludes every structure; give 1 or more")
        shipped = sample_dir() / "structures" / "test"
        self.structures = shipped if structures == "sample" else Path(structures)
        self.max_residues, self.seed, self.bfloat16 = max_residues, seed, bfloat16
        self.groups = None if groups is None else Path(groups)

    def run(self, model: PretrainedModel, data: EvaluationData | None) -> dict[str, Any]:
        """Returns the `group_scores` of the predictors, and the number of structures."""
        limit = min(self.max_residues, model.max_residues or self.max_residues)
        structures, too_long = read_folder(self.structures, limit)
        compared = {"model": model, "random_weights": model.with_random_weights(self.seed)}
        group_of = read_groups(self.groups, structures)
        found = {who: precisions(self._predicted(one, structures)) for who, one in compared.items()}
        found[NEAREST] = precisions(nearest_in_sequence(structures))
        scores = group_scores(found, group_of, seed=self.seed)
        counts = {"num_test": len(structures), "max_residues": limit, "left_out": too_long}
        return {**scores, **counts, "definition": DEFINITION}

    def table(self, results: Mapping[str, dict[str, Any]]) -> ResultTable:
        """Builds a row for each predictor and range, and for each group."""
        values = results[NO_SPLIT]
        rows = table_rows(values, ("model", "random_weights", NEAREST))
        return ResultTable(("Jacobian", *COLUMNS), rows, caption(values))

    def _predicted(
        self, model: PretrainedModel, structures: list[Structure]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        with JobProgress("Jacobians", len(structures)) as progress:
            for done, structure in enumerate(structures, start=1):
                found_LL = jacobian_contacts(model, structure.sequence, bfloat16=self.bfloat16)
                yield found_LL, contact_map(structure)
                progress.update(done)
