"""The sparse features of a protein on its page: the strongest, their residues, and their names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from protlm.analysis.features.autoencoder import FEATURES, SparseAutoencoder, read_features
from protlm.data.tables import number_of, read_columns
from protlm.downstream.concepts import RESIDUE
from protlm.model.embedding import embeddings
from protlm.model.pretrained import PretrainedModel
from protlm.report.heads import Codes
from protlm.system.errors import InputDataError, UserError
from protlm.system.json_file import read_json
from protlm.system.paths import sha256_of

_MOST = 40
# What is read of the table of `protlm features describe`.
_NUMBERS = ("feature", "F1", "low", "high", "by chance")
_COLUMNS = ("predictor", "named", "concept", "beyond controls", "examples", *_NUMBERS)


class InspectedFeatures(NamedTuple):
    """The features of a layer of a model, and what is known of those with a name, by number."""

    autoencoder: SparseAutoencoder
    names: Mapping[int, Mapping[str, Any]] | None

    def to_plain(self, model: PretrainedModel, sequence: str) -> dict[str, Any]:
        """Returns values for JSON: features with a name, then others, by their highest activity.

        Names of amino acids, which features of any model have, do not come first.
        """
        settings, places = self.autoencoder.settings, [np.arange(len(sequence))]
        (states,) = embeddings(model, [sequence], layers=[settings.layer], places=places)
        activity = self.autoencoder.features_of(torch.from_numpy(states))
        highest = activity.max(axis=0).toarray().reshape(-1)
        order = np.argsort(-highest, kind="stable")[: np.count_nonzero(highest)].tolist()
        names = self.names or {}
        first = {number for number, one in names.items() if not one["concept"].startswith(RESIDUE)}
        listed = sorted(order, key=lambda number: number not in first)[:_MOST]
        codes = map(Codes.of, activity[:, listed].toarray().T)
        return {
            "layer": settings.layer,
            "latents": settings.latents,
            "active": len(order),
            "is_described": self.names is not None,
            "listed": [
                {"number": number, "activity": one.to_plain(), "name": names.get(number)}
                for number, one in zip(listed, codes, strict=True)
            ],
        }


def read_inspected(
    folder: Path, description: Path | None, model: PretrainedModel
) -> InspectedFeatures:
    """Reads the features of a model, and what `protlm features describe` wrote, if it is given."""
    autoencoder = read_features(folder).to(model.device)
    autoencoder.settings.check(model)
    if description is None:
        return InspectedFeatures(autoencoder, None)
    made = read_json(description / "results.json", "results of protlm features describe")
    if made.get("features") != sha256_of(folder / FEATURES.weights):
        raise UserError(f"{description} describes other features than {folder}; give theirs")
    path, names = description / "names.tsv", dict[int, dict[str, Any]]()
    for line, cells in read_columns(path, "a table of names", _COLUMNS):
        one: dict[str, Any] = dict(zip(_COLUMNS, cells, strict=True))
        one |= {name: number_of(one[name]) for name in _NUMBERS}
        if None in one.values():
            raise InputDataError(f"{path}, line {line}: a number is missing; write the table anew")
        if (one["predictor"], one["named"]) == ("features", "True"):
            number = int(one["feature"])
            names[number] = max(names.get(number, one), one, key=lambda x: x["F1"])
    return InspectedFeatures(autoencoder, names)
