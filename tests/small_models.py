"""Models with random weights, in float64: small, but none of their predictions are alike."""

from protlm.checkpoints.description import ModelDescription
from protlm.config import ModelConfig, Norm, Objective, Positions
from protlm.data.vocabulary import VOCABULARY
from protlm.model.network import build_network
from protlm.model.pretrained import PretrainedModel
from protlm.model.transformer import ProteinLM


def small_model(
    attention: str, objective: str = "masked", *, max_length: int | None = None
) -> PretrainedModel:
    """A model of any length, or with a table of `max_length` positions."""
    config = ModelConfig(
        num_layers=2,
        num_heads=2,
        model_dim=16,
        feedforward_dim=16,
        max_length=max_length or 64,
        positions=Positions.rotary if max_length is None else Positions.learned,
        norm=Norm.rms,
    )

    def rebuild(seed: int) -> ProteinLM:
        return build_network(config, {"name": attention}, seed=seed).double()

    description = ModelDescription(
        VOCABULARY.hash,
        Objective(objective),
        config,
        attention,
        {},
        seed=1,
        max_length=config.max_length,
    )
    return PretrainedModel(rebuild(1), description, rebuild=rebuild)
