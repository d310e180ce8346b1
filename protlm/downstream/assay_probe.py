"""Zero-shot scores of the variants of an assay, measured in training."""

from pathlib import Path
from typing import final

import numpy as np

from protlm.downstream.estimators import default_estimator, score
from protlm.downstream.predictions import Predictor
from protlm.downstream.score_metrics import spearman
from protlm.downstream.variants import read_variants
from protlm.model.pretrained import PretrainedModel
from protlm.system.errors import InputDataError, UserError


@final
class AssayProbe:
    """Spearman's correlation of the scores of `protlm score` with the measured ones.

    The estimator is its default: masked-marginals, which takes a pass for each replaced position,
    or of a causal model causal-likelihood, which takes one for each variant.

    Args:
        path: a table of variants in ProteinGym's format.
        wild_type: the protein that they are of.
        causal: whether the model is causal.
        max_residues: the longest protein that the model accepts; None without a limit.
    """

    columns = ("probe_zero_shot",)

    def __init__(
        self, path: Path, wild_type: str, *, causal: bool, max_residues: int | None
    ) -> None:
        table = read_variants(path, wild_type)
        measured = np.array([]) if table.measured is None else table.measured
        known = np.flatnonzero(~np.isnan(measured))
        if len(known) < 3:
            raise InputDataError(
                f"{path} has {len(known)} variants with a DMS_score; give a table with 3 or more"
            )
        self._wild_type = wild_type
        self._variants = [table.variants[number] for number in known]
        self._measured = measured[known]
        indels = [variant.indel for variant in self._variants if variant.indel is not None]
        if indels and not causal:
            raise UserError(
                f"trainer.probe_assay={path} has insertions or deletions, which a masked model "
                "scores too slowly for a probe; give a table of substitutions"
            )
        longest = max(map(len, [wild_type, *indels]))
        if causal and max_residues is not None and longest > max_residues:
            raise UserError(
                f"trainer.probe_assay={path} has a protein of {longest:,} residues, and the model "
                f"accepts {max_residues:,}; give an assay of a shorter protein"
            )

    def __call__(self, model: PretrainedModel) -> dict[str, float]:
        """Returns the value of `columns`, between -1 and 1."""
        predictor = Predictor(model, quiet=True)
        found = score(default_estimator(predictor), predictor, self._wild_type, self._variants)
        return {"probe_zero_shot": spearman(self._measured, found.values)}
