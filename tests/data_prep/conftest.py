"""Fixtures for the tests of data preparation."""

from collections.abc import Callable
from pathlib import Path

import pytest

from protlm.data.records import splitting


@pytest.fixture
def small_blocks(monkeypatch) -> None:
    """Cuts files into blocks of 4 KiB, so that small ones have many."""
    monkeypatch.setattr(splitting, "BLOCK_BYTES", 1 << 12)


@pytest.fixture
def contents() -> Callable[[Path], dict[str, bytes]]:
    """Returns the bytes of all files of a folder by relative path."""

    def read(folder: Path) -> dict[str, bytes]:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}

    return read
