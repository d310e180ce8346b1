"""Checkpoints: reading returns what was written, or rejects the file by name."""

import random
import shutil
from pathlib import Path

import pytest
import torch

import protlm
from protlm.checkpoints import format as checkpoints
from protlm.checkpoints.checks import check_weights
from protlm.system.errors import InputDataError, OutputError


def newest(run: Path) -> Path:
    found = checkpoints.latest(run)
    assert found is not None
    return found


@pytest.fixture
def exported(tiny_run: Path, tmp_path: Path) -> Path:
    checkpoints.export(checkpoints.read(tiny_run), tmp_path / "exported")
    return tmp_path / "exported"


def test_a_run_a_checkpoint_and_an_export_are_one_model(tiny_run: Path, exported: Path) -> None:
    models = [protlm.load(path) for path in (tiny_run, newest(tiny_run), exported)]
    assert len({model.hash for model in models}) == 1
    logits = [model(model.tokenize(["MKTAYIAKQR"])).logits_BLV for model in models]
    assert logits[0].equal(logits[1]) and logits[0].equal(logits[2])


def test_every_flipped_bit_and_truncation_is_rejected_by_name(
    tiny_run: Path, exported: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    rng = random.Random(0)
    for path in (newest(run), exported / "model.safetensors", exported / "config.json"):
        whole = path.read_bytes()
        damaged = []
        for _ in range(20):
            flipped = bytearray(whole)
            flipped[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
            damaged.append(bytes(flipped))
        damaged += [whole[:-1], whole[: len(whole) // 2], b""]
        for contents in damaged:
            path.write_bytes(contents)
            with pytest.raises(InputDataError, match=path.name):
                protlm.load(run if path.suffix == ".ckpt" else exported)
        path.write_bytes(whole)
        protlm.load(run if path.suffix == ".ckpt" else exported)


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path: Path) -> None:
    """An expanded tensor claims terabytes in a small file, and raises the limit of memory."""
    torch.save({"weight": torch.zeros(1).expand(1 << 20, 1 << 20)}, tmp_path / "x.bin")
    weights = torch.load(tmp_path / "x.bin", weights_only=True)
    with pytest.raises(InputDataError, match="'weight' has more numbers than are stored for it"):
        check_weights(tmp_path / "x.bin", weights)
    for whole in (torch.zeros(3, 2).T, torch.zeros(6)[2:], torch.zeros(0, 4)):
        assert check_weights(tmp_path, {"weight": whole})["weight"] is whole


def test_an_export_is_not_overwritten(tiny_run: Path, exported: Path) -> None:
    with pytest.raises(OutputError, match="exists already"):
        checkpoints.export(checkpoints.read(tiny_run), exported)


def test_a_folder_without_a_model_is_rejected_with_advice(tmp_path: Path) -> None:
    with pytest.raises(InputDataError, match=r"a run folder, a \.ckpt file or an exported folder"):
        protlm.load(tmp_path)
    with pytest.raises(InputDataError, match="no such model"):
        protlm.load(tmp_path / "nothing")
