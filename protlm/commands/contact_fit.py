"""The file NAME.fit.json: a contact regression that `protlm contacts` has fitted to a model."""

import json
from pathlib import Path

from protlm.analysis.contact_regression import ContactRegression
from protlm.errors import InputDataError
from protlm.paths import existing_file


def read_fit(path: Path) -> tuple[ContactRegression, str]:
    """Returns a saved regression, and the hash of the model that it was fitted to.

    Raises:
        InputDataError: the file is missing, or is not a saved fit.
    """
    try:
        fit = json.loads(existing_file(path, "a saved fit").read_text(encoding="utf-8"))
        return ContactRegression.from_dict(fit), fit["model_hash"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputDataError(
            f"{path} is not a fit that protlm contacts saved; give a NAME.fit.json file, or a "
            "folder of structures"
        ) from error
