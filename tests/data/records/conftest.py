"""Reading bytes as if they were a file, and files in blocks of any size."""

from collections.abc import Callable
from pathlib import Path

import pytest

from protlm.data.records import Record, SequenceFile, Tally
from protlm.options.prepare import ReadOptions

Outcome = tuple[list[Record], Tally]


@pytest.fixture
def read_path() -> Callable[..., Outcome]:
    """Reads a sequence file: records and tally."""

    def read(path: Path, **options: bool) -> Outcome:
        tally = Tally()
        with SequenceFile(path, ReadOptions(**options)) as file:
            return [record for block in file.blocks() for record in block.records(tally)], tally

    return read


@pytest.fixture
def read(tmp_path: Path, read_path: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Reads bytes as a sequence file: records and tally."""

    def read_bytes(content: bytes, **options: bool) -> Outcome:
        path = tmp_path / "proteins.fasta"
        path.write_bytes(content)
        return read_path(path, **options)

    return read_bytes


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the size of a block, so that small files have many."""
    return lambda size: monkeypatch.setattr("protlm.data.records.block.BLOCK_BYTES", size)
