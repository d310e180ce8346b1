"""Contacts of changed models by the regression that was fitted to the unchanged one."""

from collections.abc import Sequence
from typing import final

import numpy as np

from protlm.analysis.contact_regression import ContactRegression, check_disjoint, head_features
from protlm.analysis.head_survey import ALL_SEPARATIONS
from protlm.analysis.precision import precision
from protlm.analysis.proteins import Protein
from protlm.model.pretrained import PretrainedModel


@final
class FittedContacts:
    """P@L of each protein by a contact regression, over pairs 6 or more apart.

    Args:
        model: the model that the regression is fitted to.
        fit: the proteins of the fit.
        proteins: the proteins to predict.
        seed: seed of the solver.
    """

    def __init__(
        self,
        model: PretrainedModel,
        fit: Sequence[Protein],
        proteins: Sequence[Protein],
        *,
        seed: int,
    ) -> None:
        check_disjoint(fit, proteins)
        self._proteins = proteins
        self._regression = ContactRegression(seed=seed).fit(
            (head_features(model, protein.sequence), protein.contacts()) for protein in fit
        )

    def of(self, model: PretrainedModel, ablated: int | None = None) -> np.ndarray:
        """Returns P@L of each protein by a model, without one of its heads; NaN without a pair."""
        found = []
        for protein in self._proteins:
            features_HLL = head_features(model, protein.sequence)
            if ablated is not None:
                features_HLL[ablated] = 0.0
            hits, count = precision(
                self._regression.predict(features_HLL),
                protein.contacts(),
                separation=ALL_SEPARATIONS,
                divisor=1,
            )
            found.append(hits / count if count else np.nan)
        return np.array(found)
