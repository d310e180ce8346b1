"""What the tests of the preparation share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from protlm.data.records import cutting


@pytest.fixture
def small_blocks(monkeypatch) -> None:
    """Cuts files into blocks of 4 KiB, so that small ones have many."""
    monkeypatch.setattr(cutting, "BLOCK_BYTES", 1 << 12)


@pytest.fixture
def contents() -> Callable[[Path], dict[str, bytes]]:
    """The bytes of all files of a folder, by their names in it."""

    def read(folder: Path) -> dict[str, bytes]:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}

    return read
