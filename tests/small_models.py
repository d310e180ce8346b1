"""Models with random weights, in float64: small, but none of their predictions are alike.

And networks by settings, what models compute one row at a time, the shortest structures, and what
evaluations say.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from protlm.checkpoints.description import ModelDescription
from protlm.config import (
    ModelConfig,
    Norm,
    Objective,
    Positions,
    Relatives,
    RelativesPositions,
    RelativesSum,
    TrainConfig,
)
from protlm.config.composition import compose
from protlm.data.vocabulary import VOCABULARY
from protlm.evaluation import create
from protlm.evaluation.base import NO_SPLIT, EvaluationData, ResultTable
from protlm.model.pretrained import PretrainedModel
from protlm.model.transformer import ProteinLM, build_network
from protlm.system.paths import sample_dir
from tests.fixtures.calls import watched


def small_model(
    attention: str,
    objective: str = "masked",
    *,
    max_length: int | None = None,
    relatives: str | None = None,
    relatives_sum: str = "joint",
    relatives_heads: int = 0,
    **options: Any,
) -> PretrainedModel:
    """A model of any length, or with a table of `max_length` positions.

    With `relatives`, positions are those of the alignment.
    """
    config = ModelConfig(
        num_layers=2,
        num_heads=2,
        model_dim=16,
        feedforward_dim=16,
        max_length=max_length or 64,
        positions=Positions.rotary if max_length is None else Positions.learned,
        norm=Norm.rms,
        relatives=None if relatives is None else Relatives(relatives),
        relatives_positions=RelativesPositions.aligned,
        relatives_sum=RelativesSum(relatives_sum),
        relatives_heads=relatives_heads,
    )

    def rebuild(seed: int) -> ProteinLM:
        return build_network(config, {"name": attention, **options}, seed=seed).double()

    description = ModelDescription(
        VOCABULARY.hash,
        Objective(objective),
        config,
        attention,
        options,
        seed=1,
        max_length=config.max_length,
    )
    return PretrainedModel(rebuild(1), description, rebuild=rebuild)


@cache
def composed(*settings: str) -> TrainConfig:
    """The settings of training; composing them takes longer than building the network."""
    return compose(TrainConfig, ["run_dir=unused", "data.dir=unused", *settings])


def network_of(*settings: str, **model: Any) -> ProteinLM:
    """The `tiny` network by settings as they are typed, and by values of `model`."""
    sizes = [] if any(one.startswith("model=") for one in settings) else ["model=tiny"]
    config = composed(*sizes, *settings)
    changed: Any = OmegaConf.merge(OmegaConf.structured(config.model), model)
    network = build_network(OmegaConf.to_object(changed), config.attention, seed=0)
    network.activation_checkpointing = config.trainer.activation_checkpointing
    return network.eval()


def random_tokens(length: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Residues, the same every time, and a mask without padding."""
    generator = torch.Generator().manual_seed(0)
    tokens_BL = torch.randint(4, 24, (batch, length), generator=generator)
    return tokens_BL, torch.ones(batch, length, dtype=torch.bool)


def tokens_of(sequence: str) -> list[int]:
    """The tokens of a protein, one by one."""
    return [VOCABULARY.cls, *(VOCABULARY[letter] for letter in sequence), VOCABULARY.eos]


def log_p_of(model: PretrainedModel, tokens: Sequence[int]) -> np.ndarray:
    """The log-probabilities of one row of tokens, LV."""
    tokens_1L = torch.tensor([list(tokens)])
    mask_1L = torch.ones_like(tokens_1L, dtype=torch.bool)
    with torch.inference_mode():
        logits_1LV = model.network(tokens_1L, mask_1L, causal=model.causal).logits_BLV
    return logits_1LV[0].double().log_softmax(-1).numpy()


def watched_batches(model: PretrainedModel, patch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The tokens of each pass from now on."""
    batches: list[torch.Tensor] = []
    seen = watched(model.network.forward, lambda tokens_BL, *_, **__: batches.append(tokens_BL))
    patch.setattr(model.network, "forward", seen)
    return batches


def shortest_structures(part: str, number: int) -> list[Path]:
    """The files of the shortest shipped structures of `test` or `fit`."""
    files = (sample_dir() / "structures" / part).glob("*.gz")
    return sorted(files, key=lambda file: file.stat().st_size)[:number]


def structure_folder(folder: Path, part: str, number: int) -> str:
    """A new folder of the shortest structures, in the name of the part."""
    folder = folder / part
    folder.mkdir()
    for file in shortest_structures(part, number):
        (folder / file.name).symlink_to(file)
    return str(folder)


def evaluated(
    name: str, model: PretrainedModel, data: EvaluationData | None = None, **settings: Any
) -> tuple[dict[str, Any], ResultTable]:
    """The values of an evaluation, which are JSON, and their table."""
    files = {key: str(value) for key, value in settings.items() if isinstance(value, Path)}
    made = create("mine", {"name": name, **settings, **files})
    values = json.loads(json.dumps(made.run(model, data), allow_nan=False))
    table = made.table({NO_SPLIT if data is None else "test": values})
    assert {len(row) for row in table.rows} == {len(table.columns)}
    return values, table
