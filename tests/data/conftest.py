"""What the tests of the data layer share."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from protlm.data.manifest import Counts, Manifest
from protlm.data.shards import ShardWriter
from protlm.data.vocabulary import RESIDUES


@pytest.fixture
def proteins() -> list[tuple[str, str]]:
    """Identifiers and sequences of 40 proteins of 1 to 200 residues."""
    rng = np.random.default_rng(0)
    letters = np.array(list(RESIDUES))
    lengths = [1, 2, 200, *rng.integers(3, 200, 37)]
    return [(f"P{i}β", "".join(rng.choice(letters, n))) for i, n in enumerate(lengths)]


@pytest.fixture
def make_data_set(tmp_path):
    """Writes proteins as the split `train`, a few to each shard, and a small split `valid`."""

    def make(proteins: Sequence[tuple[str, str]], name: str = "data") -> Path:
        directory = tmp_path / name
        directory.mkdir()
        train, valid = ShardWriter(directory, "train"), ShardWriter(directory, "valid")
        for number, (identifier, sequence) in enumerate(proteins, start=1):
            train.add(identifier, sequence)
            if number % 16 == 0:
                train.flush()
        valid.add("V", "MKV")
        for writer in (train, valid):
            writer.flush()
        splits = {"train": tuple(train.entries), "valid": tuple(valid.entries)}
        Manifest(splits, (), Counts(len(proteins) + 1), {"by": "hand"}).write(directory)
        return directory

    return make


@pytest.fixture
def data_set(make_data_set, proteins) -> Path:
    """A data set of 40 proteins in three shards."""
    return make_data_set(proteins)
