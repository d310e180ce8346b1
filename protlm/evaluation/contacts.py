"""Contacts from attention maps: the regression of `analysis.contact_regression`, scored by P@L."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protlm.analysis.contact_regression import (
    INVERSE_PENALTY,
    ContactRegression,
    check_disjoint,
    examples,
)
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
from protlm.analysis.structures import check_limit, longest_read, read_folder, structures_folder
from protlm.evaluation.base import NO_SPLIT, Evaluation, EvaluationData, ResultTable, compared
from protlm.model.pretrained import PretrainedModel

# Residues of a structure, if no other limit is given.
LONGEST = 400


class Contacts(Evaluation):
    """Precision of contacts from attention maps, beside that of random weights.

    For both, the maps are used by a fitted regression and without a fit, by their mean over heads.
    What needs no model are the pairs that are nearest in the sequence. Structures that are longer
    than `max_residues`, or than the model accepts, are excluded and listed.
    """

    needs_data = False

    def __init__(
        self,
        *,
        structures: str,
        fit_structures: str,
        max_residues: int = LONGEST,
        seed: int = 0,
        groups: str | None = None,
        scaled: bool = True,
    ) -> None:
        check_limit("max_residues", max_residues)
        self.test_dir = structures_folder(structures)
        self.fit_dir = structures_folder(fit_structures, "fit")
        self.max_residues, self.seed, self.scaled = max_residues, seed, scaled
        self.groups = None if groups is None else Path(groups)

    def run(self, model: PretrainedModel, data: EvaluationData | None) -> dict[str, Any]:
        """Returns the `group_scores` of the predictors, and the number of structures.

        `heads_used` counts the heads with a nonzero weight in each regression; `left_out` lists
        structures longer than `max_residues`.
        """
        limit = longest_read(model, self.max_residues)
        fit, too_long_to_fit = read_folder(self.fit_dir, limit)
        test, too_long_to_test = read_folder(self.test_dir, limit)
        check_disjoint(fit, test)
        group_of = read_groups(self.groups, test)
        found: dict[str, Any] = {}
        heads_used: dict[str, int] = {}
        for who, one in compared(model, self.seed).items():
            regression = ContactRegression(seed=self.seed, scaled=self.scaled)
            regression.fit(examples(one, fit))
            heads_used[who] = regression.num_heads_used
            predicted = [
                (regression.predict(features_HLL), features_HLL.mean(axis=0), contacts_LL)
                for features_HLL, contacts_LL in examples(one, test)
            ]
            found[who] = precisions((fitted, contacts) for fitted, _, contacts in predicted)
            found[f"{who}_mean_of_heads"] = precisions(
                (mean, contacts) for _, mean, contacts in predicted
            )
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
        values = results[NO_SPLIT]
        used = values["heads_used"]
        # Without a head all pairs are equally probable, and their order is random.
        heads = {
            **{who: str(used[who] or "0: chance") for who in used},
            **{f"{who}_mean_of_heads": "all" for who in used},
            NEAREST: "none",
        }
        rows = [(*row, heads[row[0].split(",")[0]]) for row in table_rows(values, list(heads))]
        return ResultTable(("contacts", *COLUMNS, "heads used"), rows, caption(values))
