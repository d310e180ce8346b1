"""Exported models: transformers computes the same without protlm, and what it saves is read."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import protlm
from protlm import attention, interop
from protlm.build import build_network
from protlm.checkpoints.description import ModelDescription
from protlm.checkpoints.format import Checkpoint
from protlm.composition import compose, to_plain
from protlm.config import ModelConfig, Norm, Objective, Positions, TrainConfig
from protlm.data.dataset import collate
from protlm.data.vocabulary import VOCABULARY
from protlm.interop import hugging_face
from protlm.model.transformer import ProteinLM

PROGRAM = Path(__file__).parent / "programs" / "use_exported.py"
SEQUENCES = ["MKTVRQERLKSIVRILERSKEPVSX", "MK", "ACDEFGHIKLMNPQRSTVWY"]
Write = Callable[..., Path]


def options_of(mechanism: str) -> dict[str, Any]:
    """The settings of `conf/attention`."""
    return dict(to_plain(compose(TrainConfig, [f"attention={mechanism}"]))["attention"])


def model_with(mechanism: str, *, seed: int = 0, **changes: Any) -> Checkpoint:
    """A tiny model with random weights."""
    options = options_of(mechanism)
    causal = not attention.mechanism(mechanism).supports_bidirectional
    settings = {"num_layers": 2, "num_heads": 2, "model_dim": 16, "feedforward_dim": 24}
    settings |= {"max_length": 64, "positions": Positions.rotary, "norm": Norm.rms}
    config = ModelConfig(**(settings | changes))
    network = build_network(config, options, seed=seed)
    del options["name"]
    description = ModelDescription(
        vocabulary=VOCABULARY.hash,
        objective=Objective.causal if causal else Objective.masked,
        model=config,
        attention=mechanism,
        attention_options=options,
        seed=seed,
        max_length=64,
    )
    return Checkpoint(Path("x"), description, network.state_dict())


def network_of(model: Checkpoint) -> ProteinLM:
    described = model.description
    network = build_network(described.model, described.attention_config, seed=1)
    network.load_state_dict(model.weights)
    return network.eval()


def exported(model: Checkpoint, folder: Path, *, maps: bool = True) -> Path:
    """Exports a model, with its outputs in `inputs.pt`."""
    hugging_face.export(model, folder, None)
    network, causal = network_of(model), model.description.objective is Objective.causal
    tokens_BL, mask_BL = collate([VOCABULARY.encode(sequence) for sequence in SEQUENCES])
    with torch.no_grad():
        out = network(tokens_BL, mask_BL, causal=causal, layers=range(network.num_layers + 1))
        inputs = list(network.attention_inputs(tokens_BL, mask_BL, causal=causal))
    rows = mask_BL[:, None, :, None]
    found = [
        network.mechanism(number).attention_map(
            x.q_BHLK, x.k_BHLK, hidden_BLD=x.hidden_BLD, mask_BL=mask_BL, causal=causal
        )
        for number, x in inputs
    ]
    expected = {
        "sequences": SEQUENCES,
        "tokens": tokens_BL,
        "mask": mask_BL,
        "causal": causal,
        "logits": out.logits_BLV[mask_BL],
        "hidden": [out.hidden[n][mask_BL] for n in sorted(out.hidden)],
        "maps": [x.detach()[rows.expand_as(x)] for x in found] if maps else [],
    }
    torch.save(expected, folder / "inputs.pt")
    return folder


def use_exported(*folders: Path) -> None:
    """Loads the folders in a process that cannot import protlm."""
    environment = {"OMP_NUM_THREADS": "1", "HOME": str(folders[0]), "HF_HOME": str(folders[0])}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *map(str, folders)],
        env=environment,
        cwd=folders[0],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("good") == len(folders)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert (found[name].dtype, found[name].tolist()) == (value.dtype, value.tolist()), name


def assert_read_again(folder: Path, model: Checkpoint) -> None:
    """What is exported, and what transformers has saved of it, is the same model."""
    saved = sorted(folder.glob("saved_*"))
    assert len(saved) == 2
    for path in (folder, *saved):
        found = interop.read(path)
        assert found.description == model.description
        assert_same(found.weights, model.weights)


def check_mechanisms(mechanisms: list[str], tmp_path: Path) -> None:
    models = {name: model_with(name) for name in mechanisms}
    folders = {name: exported(model, tmp_path / name) for name, model in models.items()}
    use_exported(*folders.values())
    for name, folder in folders.items():
        assert_read_again(folder, models[name])


@pytest.mark.peers
def test_transformers_loads_a_model_without_protlm(tmp_path: Path) -> None:
    check_mechanisms(["performer_relu", "linformer"], tmp_path)


@pytest.mark.peers
@pytest.mark.slow
def test_transformers_loads_every_mechanism(tmp_path: Path) -> None:
    check_mechanisms(attention.names(), tmp_path)
