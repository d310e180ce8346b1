"""Records to shards: each split fills its own, in the order of the input."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data_prep.split import SplitRule
from protlm.data.manifest import ShardEntry
from protlm.data.records import Record, Tally
from protlm.data.shards import ShardWriter
from protlm.errors import UserError

UNLISTED = "in no split"


@dataclass
class ShardCutter:
    """Distributes records over splits and writes a shard whenever one is full.

    Args:
        directory: where the shards go.
        split_rule: which split a record belongs to.
        shard_residues: a shard is written once it has at least so many residues.

    Raises:
        UserError: `shard_residues` is not positive.
    """

    directory: Path
    split_rule: SplitRule
    shard_residues: int
    _writers: dict[str, ShardWriter] = field(default_factory=dict)
    # Python's hash differs between runs, but whether two are equal does not. Eight bytes for each
    # sequence are 2 GB for TrEMBL, and a chance of 1 in 600 that the count is off by one there.
    _hashes: array = field(default_factory=lambda: array("q"))

    def __post_init__(self) -> None:
        if self.shard_residues < 1:
            raise UserError(f"shard_residues={self.shard_residues} must be at least 1")

    def write(self, records: Iterator[Record], tally: Tally) -> None:
        """Takes all records; those that belong to no split are counted as rejected."""
        for record in records:
            split = self.split_rule.split_of(record)
            if split is None:
                tally.reject(UNLISTED, record.identifier, record.line)
                continue
            if split not in self._writers:
                self._writers[split] = ShardWriter(self.directory, split)
            writer = self._writers[split]
            writer.add(record.identifier, record.sequence)
            self._hashes.append(hash(record.sequence))
            if writer.num_residues >= self.shard_residues:
                writer.flush()

    def finish(self) -> dict[str, tuple[ShardEntry, ...]]:
        """Writes the last shard of each split; returns the shards of all splits."""
        for writer in self._writers.values():
            writer.flush()
        return {split: tuple(self._writers[split].entries) for split in sorted(self._writers)}

    def num_duplicates(self) -> int:
        """How many sequences came before, letter by letter."""
        hashes = np.sort(np.frombuffer(self._hashes, dtype=np.int64))
        return int(np.count_nonzero(hashes[1:] == hashes[:-1]))
