"""Runs that several tests of commands use."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def causal_run(train_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal run of the `tiny` model."""
    return train_tiny(tmp_path_factory.mktemp("runs") / "causal", "objective=causal")
