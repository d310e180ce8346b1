"""Contacts from attention maps: a sparse logistic regression over all heads.

Rao et al. 2020 (doi:10.1101/2020.12.15.422761): every map is symmetrized and corrected by the
average product (APC, Dunn et al. 2008); the regression is fitted to a few proteins of known
structure and scored by the precision of the L most probable pairs (P@L) of other proteins.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from protlm.analysis.contact_regression import (
    INVERSE_PENALTY,
    ContactRegression,
    check_disjoint,
    head_features,
)
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


class Contacts(Evaluation):
    """Precision of contacts from attention maps, beside that of random weights.

    For both, the maps are used by a fitted regression and without a fit, by their mean over heads.
    What needs no model are the pairs that are nearest in the sequence.

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
        """Returns the `group_scores` of the predictors, and the number of structures.

        `heads_used` counts the heads with a nonzero weight in each regression; `left_out` lists
        structures longer than `max_residues`.
        """
        limit = min(self.max_residues, model.max_residues or self.max_residues)
        fit, too_long_to_fit = read_folder(self.fit_dir, limit)
        test, too_long_to_test = read_folder(self.test_dir, limit)
        check_disjoint(fit, test)
        group_of = read_groups(self.groups, test)
        found: dict[str, Any] = {}
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
            found[who], found[f"{who}_mean_of_heads"] = precisions(fitted), precisions(mean)
        found[NEAREST] = precisions(nearest_in_sequence(test))
        return {
            **group_scores(found, group_of, seed=self.seed),
            "heads_used": heads_used,
            "scaled": self.scaled,
            "inverse_penalty": INVERSE_PENALTY,
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
        heads |= {f"{who}_mean_of_heads": "all" for who in used} | {NEAREST: "none"}
        rows = [(*row, heads[row[0].split(",")[0]]) for row in table_rows(values, list(heads))]
        return ResultTable(("contacts", *COLUMNS, "heads used"), rows, caption(values))


def _examples(
    model: PretrainedModel, structures: list[Structure]
) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    # The maps of one protein at a time, because all of them may not fit in memory.
    for structure in structures:
        yield head_features(model, structure.sequence), contact_map(structure)
