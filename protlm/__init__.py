"""Protein language models with linear-cost attention: train, embed and inspect them."""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pathlib import Path

    from protlm.model.pretrained import PretrainedModel


def load(path: "str | Path") -> "PretrainedModel":
    """Loads a model: a run, a checkpoint, an exported or foreign model, or a shipped model's name.

    Raises:
        UserError: the path does not contain a model, or the model is damaged.
    """
    from pathlib import Path

    from protlm.build import load_model

    return load_model(Path(path))
