"""Files of labels, as they are written and read."""

import gzip
from pathlib import Path

import pytest

from protlm.downstream.labels import LabeledProteins, read_labeled_proteins


@pytest.fixture
def read(tmp_path: Path):
    """Writes a file of labels and reads it."""

    def written(text: str, name: str = "labels.tsv", **options) -> LabeledProteins:
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return read_labeled_proteins(path, **options)

    return written
