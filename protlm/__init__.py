"""Protein language models with linear-cost attention: train, embed, look inside."""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pathlib import Path

    from protlm.model.pretrained import PretrainedModel


def load(path: "str | Path") -> "PretrainedModel":
    """Loads a model for use from a run folder, a checkpoint or an exported folder.

    Raises:
        UserError: the path holds no model, or a damaged one.
    """
    from pathlib import Path

    from protlm.build import load_model

    return load_model(Path(path))
