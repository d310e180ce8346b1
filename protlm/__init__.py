"""Protein language models with linear-cost attention: train, embed and inspect them."""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pathlib import Path

    from protlm.interface import Model


def load(path: "str | Path", *, device: str = "auto") -> "Model":
    """Loads a model: a run, a checkpoint, an exported or foreign model, or a shipped model's name.

    Args:
        path: the model.
        device: auto (a GPU, if there is one), cpu, cuda or cuda:1.

    Raises:
        UserError: the path does not contain a model, the model is damaged, or there is no such
            device.
    """
    from pathlib import Path

    from protlm.interface import Model
    from protlm.loading import load_model
    from protlm.system.paths import in_home

    return Model.of(load_model(Path(in_home(str(path))), device=device))
