"""A block of records to arrays: filtered, split and encoded, in whichever process."""

from dataclasses import dataclass
from hashlib import blake2b
from itertools import compress

import numpy as np

from data_prep.select import Selection
from data_prep.split import SplitRule
from protlm.data.records import Block, Tally
from protlm.data.shard_writer import PackedSequences

DIGEST_BYTES = 16


@dataclass(frozen=True)
class EncodedBlock:
    """The records of a block that are wanted, as arrays, and what became of all of them.

    Args:
        splits: the sequences of each split, in the order of the input.
        members: the place of each record's split in `splits`, in the order of the input,
            uint16 [records].
        digests: the hash of each record's sequence, uint64 [records, 2].
        tally: the counts of the block.
    """

    splits: dict[str, PackedSequences]
    members: np.ndarray
    digests: np.ndarray
    tally: Tally

    @property
    def num_residues(self) -> int:
        """Residues over all splits."""
        return sum(len(packed.tokens) for packed in self.splits.values())

    def keep(self, is_kept: np.ndarray) -> "EncodedBlock":
        """Those records alone where `is_kept`, bool [records], is true; the tally stays."""
        splits = {
            split: packed.keep(is_kept[self.members == number])
            for number, (split, packed) in enumerate(self.splits.items())
        }
        return EncodedBlock(splits, self.members[is_kept], self.digests[is_kept], self.tally)


@dataclass(frozen=True)
class Encoder:
    """What is to be done with every record; shared by all processes, and changed by none."""

    selection: Selection
    split_rule: SplitRule

    def __call__(self, block: Block) -> EncodedBlock:
        """Parses a block, and encodes its records.

        Raises:
            InputDataError: the block cannot be of its format, or is DNA.
        """
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
        numbers = {split: number for number, split in enumerate(dict.fromkeys(splits))}
        members = np.array([numbers[split] for split in splits], np.uint16)
        packed: dict[str, PackedSequences] = {}
        for split, number in numbers.items():
            is_in = (members == number).tolist()
            packed[split] = PackedSequences.pack(
                list(compress(identifiers, is_in)), list(compress(sequences, is_in))
            )
        # Big-endian, as the splits read them.
        halves = np.frombuffer(b"".join(digests), ">u8").astype(np.uint64).reshape(-1, 2)
        return EncodedBlock(packed, members, halves, tally)
