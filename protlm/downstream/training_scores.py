"""What a model can do so far, measured in training: contacts, secondary structure, zero shot."""

from pathlib import Path
from typing import final

import numpy as np

from protlm.analysis.contact_regression import ContactRegression, examples
from protlm.analysis.precision import scores
from protlm.analysis.structures import read_folder
from protlm.downstream.estimators import LogProbabilities, default_estimator, score
from protlm.downstream.metrics import spearman
from protlm.downstream.probing import probe_features
from protlm.downstream.tasks import state_targets
from protlm.downstream.variants import read_variants
from protlm.model.embedding import embeddings
from protlm.model.pretrained import PretrainedModel
from protlm.system.errors import InputDataError, UserError
from protlm.system.paths import sample_dir


@final
class StructureScores:
    """Long- and short-range P@L of the contact regression, and Q3 of a linear probe.

    Both are fitted to some of the shipped structures that evaluations fit to, and tested on others.
    """

    columns = ("measured_contacts_short", "measured_contacts_long", "measured_secondary_structure")

    def __init__(self, *, num_fit: int = 10, num_test: int = 10, max_residues: int = 220) -> None:
        structures, _ = read_folder(sample_dir() / "structures" / "fit", max_residues)
        self._fit, self._test = structures[:num_fit], structures[num_fit : num_fit + num_test]

    def __call__(self, model: PretrainedModel) -> dict[str, float]:
        """Returns the values of `columns`, fractions between 0 and 1."""
        regression = ContactRegression().fit(examples(model, self._fit))
        contacts = scores(
            (regression.predict(features_HLL), contacts_LL)
            for features_HLL, contacts_LL in examples(model, self._test)
        )
        short, long = (contacts[name]["P@L"]["mean"] for name in ("short", "long"))
        sequences, targets, split = state_targets(self._fit, self._test)
        (states,) = embeddings(model, sequences, layers=[model.num_layers], places=targets.places)
        structure = probe_features(states, targets, split).scores.values["accuracy"]
        return dict(zip(self.columns, (short, long, structure), strict=True))


@final
class AssayScores:
    """Spearman's correlation of the default scores of `protlm score` with measured ones."""

    columns = ("measured_zero_shot",)

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
                f"trainer.measure_assay={path} has insertions or deletions, which a masked model "
                "scores too slowly during training; give a table of substitutions"
            )
        longest = max(map(len, [wild_type, *indels]))
        if causal and max_residues is not None and longest > max_residues:
            raise UserError(
                f"trainer.measure_assay={path} has a protein of {longest:,} residues, and the "
                f"model accepts {max_residues:,}; give an assay of a shorter protein"
            )

    def __call__(self, model: PretrainedModel) -> dict[str, float]:
        """Returns the value of `columns`, between -1 and 1."""
        predictor = LogProbabilities(model, quiet=True)
        found = score(default_estimator(predictor), predictor, self._wild_type, self._variants)
        return {"measured_zero_shot": spearman(self._measured, found.values)}
