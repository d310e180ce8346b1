"""Conversion of a block of records to arrays: selected, split and encoded."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import compress

import numpy as np

from protlm.data.records import Block, Record, Tally
from protlm.data.shards.writer import PackedSequences
from protlm.options.prepare import Selection

from .clusters import ClusterTable
from .split import HOMOLOG, SplitRule

DIGEST_BYTES = 16
UNLISTED = "a cluster by itself, because it is missing from the cluster table"
_VIRUS = re.compile(r"\b(bacterio)?phage|virus\b")


def digest_of(record: Record) -> bytes:
    """Returns the hash of a record's sequence."""
    return blake2b(record.sequence.encode(), digest_size=DIGEST_BYTES).digest()


def selected(records: Iterator[Record], selection: Selection, tally: Tally) -> Iterator[Record]:
    """Yields the selected records, and counts the others as filtered."""
    taxa = {int(organism) for organism in selection.organisms if organism.isdecimal()}
    names = tuple(o.casefold() for o in selection.organisms if not o.isdecimal())
    for record in records:
        length = len(record.sequence)
        if selection.min_length is not None and length < selection.min_length:
            tally.filtered[f"shorter than {selection.min_length:,} residues"] += 1
        elif selection.max_length is not None and length > selection.max_length:
            tally.filtered[f"longer than {selection.max_length:,} residues"] += 1
        elif selection.no_fragments and record.is_fragment:
            tally.filtered["fragment"] += 1
        elif selection.organisms and not _is_of(record, taxa, names):
            is_missing = (taxa and record.taxon is None) or (names and record.organism is None)
            why = "organism missing in the source" if is_missing else "other organism"
            tally.filtered[why] += 1
        else:
            if selection.no_fragments and record.is_fragment is None:
                tally.noted["fragment status missing in the source"] += 1
            yield record


@dataclass(frozen=True)
class EncodedBlock:
    """The selected records of a block as arrays, and the counts of all its records.

    Args:
        members: index into `splits` of each record's split, in the order of the input,
            uint16 [records].
        digests: hash of each record's sequence, uint64 [records, 2].
    """

    splits: dict[str, PackedSequences]
    members: np.ndarray
    digests: np.ndarray
    tally: Tally

    @property
    def num_residues(self) -> int:
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
        tally, rule = Tally(), self.split_rule
        rows = list[tuple[str, str, bytes, bytes]]()
        for record in selected(block.records(tally), self.selection, tally):
            digest = digest_of(record)
            split = rule.split_of(record, digest)
            if split is None or split == HOMOLOG:
                tally.filtered[split or "in no split"] += 1
            else:
                tally.noted.update(rule.notes_of(record, split))
                rows.append((split, record.identifier, record.sequence.encode(), digest))
        splits, identifiers, sequences, digests = zip(*rows, strict=True) if rows else [()] * 4
        clusters = None
        if self.clusters is not None:
            clusters, is_listed = self.clusters.clusters_of(identifiers)
            if num_unlisted := len(is_listed) - int(np.count_nonzero(is_listed)):
                tally.noted[UNLISTED] += num_unlisted
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


def _is_of(record: Record, taxa: set[int], names: tuple[str, ...]) -> bool:
    if record.taxon in taxa:
        return True
    organism = (record.organism or "").casefold()
    # The name is followed by the strain or subspecies and, in flat files, by other names; but
    # phages and viruses of a species are excluded.
    return any(
        organism == name
        or (organism.startswith(f"{name} ") and not _VIRUS.search(organism, len(name)))
        for name in names
    )
