"""Contacts and secondary structure on a few structures, cheap enough to be measured in training."""

from typing import final

import numpy as np

from protlm.analysis.contact_regression import ContactRegression, head_features
from protlm.analysis.precision import scores
from protlm.analysis.probes import class_scores, probe
from protlm.analysis.residue_states import residue_embeddings, residue_examples
from protlm.analysis.structures import Structure, contact_map, read_folder
from protlm.model.pretrained import PretrainedModel
from protlm.paths import sample_dir


@final
class StructureProbe:
    """Long- and short-range P@L of the contact regression, and Q3 of a linear probe.

    Both are fitted anew at each call to some of the shipped structures, and tested on others. The
    probe reads the last layer. Calls use no global random numbers.

    Args:
        num_fit: the number of structures to fit to.
        num_test: the number of structures to test on.
        max_residues: longer structures are left out.
    """

    columns = ("probe_contacts_short", "probe_contacts_long", "probe_secondary_structure")

    def __init__(self, *, num_fit: int = 10, num_test: int = 10, max_residues: int = 200) -> None:
        folder = sample_dir() / "structures"
        self._fit = read_folder(folder / "fit", max_residues)[0][:num_fit]
        self._test = read_folder(folder / "test", max_residues)[0][:num_test]

    def __call__(self, model: PretrainedModel) -> dict[str, float]:
        """Returns the values of `columns`, fractions between 0 and 1."""
        contacts = self._contacts(model)
        values = (contacts["short"], contacts["long"], self._secondary_structure(model))
        return dict(zip(self.columns, values, strict=True))

    def _contacts(self, model: PretrainedModel) -> dict[str, float]:
        fit = (_example(model, structure) for structure in self._fit)
        regression = ContactRegression().fit(fit)
        predicted = []
        for structure in self._test:
            features_HLL, contacts_LL = _example(model, structure)
            predicted.append((regression.predict(features_HLL), contacts_LL))
        return {name: found["P@L"]["mean"] for name, found in scores(predicted).items()}

    def _secondary_structure(self, model: PretrainedModel) -> float:
        fit, test = (
            residue_examples(some, residue_embeddings(model, some, [model.num_layers]))
            for some in (self._fit, self._test)
        )
        found = class_scores(probe(fit, test).predicted, test.labels, test.groups)
        return found["accuracy"]["value"]


def _example(model: PretrainedModel, structure: Structure) -> tuple[np.ndarray, np.ndarray]:
    return head_features(model, structure.sequence), contact_map(structure)
