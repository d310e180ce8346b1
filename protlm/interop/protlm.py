"""Models that protlm exported for Hugging Face, as they are or saved again by transformers."""

from typing import final

import torch

from protlm.checkpoints.description import ModelDescription
from protlm.checkpoints.format import CONFIG
from protlm.interop.base import Family, ForeignModel
from protlm.interop.layout import FREQUENCY, used_once
from protlm.interop.source import Source

# The name of the network in the classes of transformers.
NETWORK = "network."


@final
class Protlm(Family):
    """Models of protlm with `ProtlmForMaskedLM` or `ProtlmForCausalLM`."""

    def translate(self, source: Source) -> ForeignModel:
        description = ModelDescription.parse(source.path / CONFIG, source.settings.get("protlm"))
        names = {n.removeprefix(NETWORK): n for n in source.tensors if n.startswith(NETWORK)}
        weights = used_once(source.path, source.tensors, names)
        # Older exports have the frequencies among the weights.
        frequencies = source.settings.get("frequencies")
        if frequencies is not None:
            weights[FREQUENCY] = torch.tensor(frequencies, dtype=torch.float64)
        if FREQUENCY in weights:
            weights[FREQUENCY] = weights[FREQUENCY].double()
        return ForeignModel(source.path, description, weights)
