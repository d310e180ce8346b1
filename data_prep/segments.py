"""A segment: what lies between two points from which a killed build can be continued."""

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

from data_prep.duplicates import DigestSet
from data_prep.encode import EncodedBlock
from data_prep.journal import Segment
from data_prep.sources import Place
from data_prep.work_folder import WorkFolder
from protlm.data.manifest import SourceEntry
from protlm.data.records import Tally
from protlm.data.shard_writer import PackedSequences, write_shard
from protlm.paths import complete_file

DUPLICATE = "duplicate sequence"
# Short sequences take more memory than their residues: identifiers, offsets and digests.
_MAX_SEQUENCES = 1 << 22


class OpenSegment:
    """Collects blocks, in the order of the input, until they are written as one segment.

    Args:
        known: the sequences of the segments before, and soon of this one.
        deduplicate: leaves out sequences that came before; else they are counted alone.
    """

    def __init__(self, known: DigestSet, *, deduplicate: bool) -> None:
        self._known, self._deduplicate = known, deduplicate
        self._splits: dict[str, list[PackedSequences]] = {}
        self._first_seen: list[np.ndarray] = []
        self._num_sequences, self._num_residues = 0, 0
        self.tally = Tally()

    def is_full(self, shard_residues: int) -> bool:
        """Whether there are so many residues in it, or 4,194,304 sequences."""
        return self._num_residues >= shard_residues or self._num_sequences >= _MAX_SEQUENCES

    def add(self, block: EncodedBlock) -> None:
        """Adds a block.

        Raises:
            OSError: the disk is full.
        """
        is_new = self._known.add(block.digests)
        self._first_seen.append(block.digests[is_new])
        self.tally.add(block.tally)
        if num_copies := len(is_new) - int(np.count_nonzero(is_new)):
            if self._deduplicate:
                block = block.keep(is_new)
                self.tally.filtered[DUPLICATE] += num_copies
            else:
                self.tally.noted[DUPLICATE] += num_copies
        for split, packed in block.splits.items():
            if len(packed):
                self._splits.setdefault(split, []).append(packed)
        self._num_sequences += len(block.members)
        self._num_residues += block.num_residues

    def write(self, work: WorkFolder, end: Place, sources: Sequence[SourceEntry]) -> None:
        """Writes a shard for each split that has a sequence, and then the journal's entry.

        Args:
            work: where to.
            end: the place in the sources behind the last block.
            sources: all sources that were read so far; those before `end` count.

        Raises:
            OutputError: no space, or another process has taken over.
        """
        work.lock.check()
        before = work.journal.segments
        numbers = Counter(split for segment in before for split in segment.shards)
        shards = {
            split: write_shard(work.data, f"{split}/shard-{numbers[split]:05d}.h5", parts)
            for split, parts in sorted(self._splits.items())
        }
        digests = np.concatenate([np.zeros((0, 2), np.uint64), *self._first_seen]).tobytes()
        with complete_file(work.first_seen(len(before))) as temporary:
            # Not by numpy, whose error on a full disk does not say that the disk is full.
            temporary.write_bytes(digests)
        num_named = sum(len(segment.sources) for segment in before)
        finished = tuple(sources[num_named : end.source])
        sha256 = hashlib.sha256(digests).hexdigest()
        work.journal.append(Segment(end, finished, shards, self.tally, sha256))


def known_before(work: WorkFolder) -> DigestSet:
    """The digests of all sequences in the finished segments.

    Raises:
        InputDataError: a file of digests is damaged.
        OSError: the disk is full.
    """
    known = DigestSet(work.known_digests)
    for number in range(len(work.journal.segments)):
        known.add(work.read_first_seen(number))
    return known
