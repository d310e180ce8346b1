"""The file NAME.fit.json: a contact regression that `protlm contacts` has fitted to a model."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from protlm.analysis.contact_regression import ContactRegression
from protlm.system.errors import InputDataError
from protlm.system.json_file import read_json
from protlm.system.paths import complete_file


@dataclass(frozen=True)
class SavedFit:
    """A regression on the heads of a model.

    Attributes:
        regression: the fit.
        model_hash: the hash of the model's weights.
        fitted_to: SHA-256 of the sequences of the structures; empty in files of older versions.
    """

    regression: ContactRegression
    model_hash: str
    fitted_to: frozenset[str]

    def saw(self, sequence: str) -> bool:
        """Returns whether a structure of this sequence is among those of the fit."""
        return digest(sequence) in self.fitted_to


def digest(sequence: str) -> str:
    """Returns the SHA-256 of a sequence, in hexadecimal."""
    return hashlib.sha256(sequence.encode()).hexdigest()


def write_fit(fit: SavedFit, path: Path) -> None:
    """Writes a fit."""
    content = {
        "model_hash": fit.model_hash,
        "fitted_to": sorted(fit.fitted_to),
        **fit.regression.to_dict(),
    }
    with complete_file(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_fit(path: Path) -> SavedFit:
    """Reads a fit."""
    try:
        fit = read_json(path, "a saved fit")
        fitted_to = frozenset(map(str, fit.get("fitted_to", ())))
        return SavedFit(ContactRegression.from_dict(fit), fit["model_hash"], fitted_to)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputDataError(
            f"{path} is not a fit that protlm contacts saved; give a NAME.fit.json file, or a "
            "folder of structures"
        ) from error
