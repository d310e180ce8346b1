"""The models that come with protlm, each in a folder with weights, description and model card."""

import sys
from pathlib import Path

from protlm.system.errors import InputDataError, did_you_mean
from protlm.system.paths import models_dir

DEFAULT = "hybrid-6m"
CARD = "README.md"
RESULTS = "results.json"


def shipped_models() -> list[Path]:
    """Returns the folders of the shipped models, by name."""
    return sorted(path.parent for path in models_dir().glob(f"*/{CARD}"))


def default_model() -> Path:
    """Returns the folder of the shipped model that commands use where none is named."""
    folder = models_dir() / DEFAULT
    if (folder / CARD).is_file():
        return folder
    raise InputDataError(
        f"{DEFAULT} is not installed with protlm; name a model with -m MODEL "
        "(evaluate: checkpoint=MODEL)"
    )


def announced_default(option: str) -> Path:
    """Returns the default model, and prints on standard error that it is used.

    Args:
        option: what to type for another model.
    """
    folder = default_model()
    print(f"model: {folder.name}, shipped with protlm; {option} uses another", file=sys.stderr)
    return folder


def find_model(path: Path) -> Path:
    """Returns the folder of the shipped model of this name; otherwise, or if it exists, `path`.

    >>> find_model(Path("runs/mine"))
    PosixPath('runs/mine')
    """
    named = [folder for folder in shipped_models() if folder.name == str(path)]
    return named[0] if named and not path.exists() else path


def similar_model(path: Path) -> str:
    """Returns a question that suggests the shipped model of a similar name, or ""."""
    return did_you_mean(str(path), {folder.name: folder.name for folder in shipped_models()})
