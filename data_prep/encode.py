"""Conversion of a block of records to arrays: filtered, split and encoded."""

from dataclasses import dataclass
from hashlib import blake2b
from itertools import compress

import numpy as np

from protlm.data.records import Block, Tally
from protlm.data.shards.writer import PackedSequences

from .cluster_table import ClusterTable
from .select import Selection
from .split import SplitRule

DIGEST_BYTES = 16
UNLISTED = "a cluster by itself, because it is missing from the cluster table"


@dataclass(frozen=True)
class EncodedBlock:
    """The selected records of a block as arrays, and the counts of all its records.

    Args:
        splits: sequences of each split, in the order of the input.
        members: index into `splits` of each record's split, in the order of the input,
            uint16 [records].
        digests: hash of each record's sequence, uint64 [records, 2].
        tally: counts of the block.
    """

    splits: dict[str, PackedSequences]
    members: np.ndarray
    digests: np.ndarray
    tally: Tally

    @property
    def num_residues(self) -> int:
        """Number of residues in all splits."""
        return sum(len(packed.tokens) for packed in self.splits.values())

    def keep(self, is_kept: np.ndarray) -> "EncodedBlock":
        """Keeps only the records where `is_kept`, bool [records], is true; keeps the tally."""
        splits = {
            split: packed.keep(is_kept[self.members == number])
            for number, (split, packed) in enumerate(self.splits.items())
        }
        return EncodedBlock(splits, self.members[is_kept], self.digests[is_kept], self.tally)


@dataclass(frozen=True)
class Encoder:
    """Selects, splits and encodes records; immutable, and shared by all processes.

    With `clusters`, the cluster of each sequence is stored too.
    """

    selection: Selection
    split_rule: SplitRule
    clusters: ClusterTable | None = None

    def __call__(self, block: Block) -> EncodedBlock:
        """Parses a block and encodes its records."""
        tally, rule = Tally(), self.split_rule
        splits: list[str] = []
        identifiers: list[str] = []
        sequences: list[bytes] = []
        digests: list[bytes] = []
        for record in self.selection.select(block.records(tally), tally):
            letters = record.sequence.encode()
            digest = blake2b(letters, digest_size=DIGEST_BYTES).digest()
            split = rule.split_of(record, digest)
            if split is None:
                tally.filter("in no split")
                continue
            for note in rule.notes_of(record, split):
                tally.note(note)
            splits.append(split)
            identifiers.append(record.identifier)
            sequences.append(letters)
            digests.append(digest)
        clusters = self._clusters_of(identifiers, tally)
        numbers = {split: number for number, split in enumerate(dict.fromkeys(splits))}
        members = np.array([numbers[split] for split in splits], np.uint16)
        packed: dict[str, PackedSequences] = {}
        for split, number in numbers.items():
            is_in = members == number
            packed[split] = PackedSequences.pack(
                list(compress(identifiers, is_in.tolist())),
                list(compress(sequences, is_in.tolist())),
                None if clusters is None else clusters[is_in],
            )
        # Big-endian, as the split rules interpret them.
        halves = np.frombuffer(b"".join(digests), ">u8").astype(np.uint64).reshape(-1, 2)
        return EncodedBlock(packed, members, halves, tally)

    def _clusters_of(self, identifiers: list[str], tally: Tally) -> np.ndarray | None:
        """Returns the cluster of each record, uint64; counts the records missing from the table."""
        if self.clusters is None:
            return None
        clusters, is_listed = self.clusters.clusters_of(identifiers)
        if num_unlisted := len(is_listed) - int(np.count_nonzero(is_listed)):
            tally.noted[UNLISTED] += num_unlisted
        return clusters
