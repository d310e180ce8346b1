"""Fixtures for the tests of data preparation."""

import gzip
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from protlm.data.records import block
from protlm.data.shards.data_set import open_split
from protlm.data.shards.manifest import read_manifest
from protlm.data.vocabulary import VOCABULARY
from protlm.data_prep.prepare import prepare
from protlm.data_prep.report import Report
from protlm.data_prep.split import HashSplit
from protlm.options.prepare import PrepareOptions

_ALL_TRAIN = HashSplit(0, 0)


@pytest.fixture
def small_blocks(monkeypatch) -> None:
    """Cuts files into blocks of 4 KiB, so that small ones have many."""
    monkeypatch.setattr(block, "BLOCK_BYTES", 1 << 12)


@pytest.fixture
def fasta(tmp_path) -> Callable[..., Path]:
    """Writes bytes, or a text, as a sequence file."""

    def write(content, name="proteins.fasta"):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


@pytest.fixture
def out(tmp_path) -> Path:
    """A data set to be made, in a folder that is not there yet."""
    return tmp_path / "output" / "data"


@pytest.fixture
def build() -> Callable[..., Report]:
    """Prepares sources, by default as one split; named arguments are those of the options."""

    def run(sources, out, rule=_ALL_TRAIN, clusters=None, submission=None, **options):
        return prepare(
            [sources] if isinstance(sources, Path) else list(sources),
            out,
            split_rule=rule,
            clusters=clusters,
            options=PrepareOptions(**options),
            submission=submission,
        )

    return run


@pytest.fixture
def in_shards() -> Callable[[Path], dict[str, list[tuple[str, str]]]]:
    """Returns the identifiers and sequences of each split of a data set."""

    def read(directory):
        found = {}
        for split in read_manifest(directory).splits:
            reader = open_split(directory, split)
            found[split] = [
                (reader.identifier(i), VOCABULARY.decode(reader[i])) for i in range(len(reader))
            ]
        return found

    return read


@pytest.fixture
def table(tmp_path) -> Callable[..., Path]:
    """Writes a text, or rows of fields, as a table; compressed if its name says so."""

    def write(content, name="table.tsv"):
        if not isinstance(content, str):
            content = "".join("\t".join(row) + "\n" for row in content)
        path = tmp_path / name
        encoded = content.encode()
        path.write_bytes(gzip.compress(encoded) if name.endswith(".gz") else encoded)
        return path

    return write


@pytest.fixture
def install_mmseqs(tmp_path, monkeypatch) -> Callable[..., Path]:
    """Puts a program named mmseqs on the PATH, and returns its folder.

    Its text is formatted with the path of Python and the given names.
    """

    def install(program: str, **names: str) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "mmseqs").write_text(program.format(python=sys.executable, **names))
        (folder / "mmseqs").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        return folder

    return install
