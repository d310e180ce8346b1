"""Contacts and secondary structure on a few structures, cheap enough to be measured in training."""

from typing import final

import numpy as np

from protlm.analysis.contact_regression import ContactRegression, head_features
from protlm.analysis.precision import scores
from protlm.analysis.structures import Structure, contact_map, read_folder
from protlm.downstream.features import embeddings
from protlm.downstream.probing import probe_features
from protlm.downstream.residue_states import state_targets
from protlm.model.pretrained import PretrainedModel
from protlm.system.paths import sample_dir

_TOKENS_PER_BATCH = 4_096


@final
class StructureProbe:
    """Long- and short-range P@L of the contact regression, and Q3 of a linear probe.

    Both are fitted anew at each call to some of the shipped structures, and tested on others. All
    are structures that the evaluations fit to, so that those they test on decide nothing during
    training. The probe reads the last layer. Calls use no global random numbers.

    Args:
        num_fit: the number of structures to fit to.
        num_test: the number of structures to test on.
        max_residues: longer structures are left out; none is by default.
    """

    columns = ("probe_contacts_short", "probe_contacts_long", "probe_secondary_structure")

    def __init__(self, *, num_fit: int = 10, num_test: int = 10, max_residues: int = 220) -> None:
        structures, _ = read_folder(sample_dir() / "structures" / "fit", max_residues)
        self._fit, self._test = structures[:num_fit], structures[num_fit : num_fit + num_test]

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
        sequences, targets, split = state_targets(self._fit, self._test)
        (states,) = embeddings(
            model,
            sequences,
            layers=[model.num_layers],
            tokens_per_batch=_TOKENS_PER_BATCH,
            places=targets.places,
        )
        return probe_features(states, targets, split).scores.values["accuracy"]


def _example(model: PretrainedModel, structure: Structure) -> tuple[np.ndarray, np.ndarray]:
    return head_features(model, structure.sequence), contact_map(structure)
