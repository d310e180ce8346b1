"""A second data set, and a model with its converted twin."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from protlm.checkpoints.format import export
from protlm.conversion import convert
from protlm.loading import read_model


@pytest.fixture(scope="session")
def other_data(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same sequences in another folder, which a mixture treats as another data set."""
    return Path(shutil.copytree(tiny_data, tmp_path_factory.mktemp("data") / "other"))


@pytest.fixture(scope="session")
def teacher(train_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny(tmp_path_factory.mktemp("runs") / "teacher", "attention=softmax")


@pytest.fixture(scope="session")
def swapped(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The teacher with the attention of Hedgehog."""
    folder = tmp_path_factory.mktemp("runs") / "swapped"
    export(convert(read_model(teacher), {"name": "hedgehog"}, seed=0).checkpoint, folder)
    return folder
