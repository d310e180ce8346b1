"""A segment: the records between two points from which a killed build can resume."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from protlm.data.records import Tally
from protlm.data.shards.manifest import SourceEntry
from protlm.data.shards.writer import PackedSequences, write_shard
from protlm.system.parts import new_part

from .duplicates import DigestSet
from .encode import EncodedBlock
from .sources import Place
from .work_folder import BuildFolder, Segment

DUPLICATE = "duplicate sequence"
# Short sequences take more memory than their residues: identifiers, offsets and digests.
_MAX_SEQUENCES = 1 << 22


class OpenSegment:
    """Collects blocks, in the order of the input, until they are written as one segment.

    Duplicates of `known` digests are removed; None keeps all sequences.
    """

    def __init__(self, known: DigestSet | None) -> None:
        self._known = known
        self._splits: dict[str, list[PackedSequences]] = {}
        self._first_seen: list[np.ndarray] = []
        self._num_sequences, self._num_residues = 0, 0
        self.tally = Tally()

    def is_full(self, shard_residues: int) -> bool:
        """Returns whether the segment has this number of residues, or 4,194,304 sequences."""
        return self._num_residues >= shard_residues or self._num_sequences >= _MAX_SEQUENCES

    def add(self, block: EncodedBlock) -> None:
        self.tally.add(block.tally)
        if self._known is not None:
            is_new = self._known.add(block.digests)
            self._first_seen.append(block.digests[is_new])
            if num_copies := len(is_new) - int(np.count_nonzero(is_new)):
                self.tally.filtered[DUPLICATE] += num_copies
                block = block.keep(is_new)
        for split, packed in block.splits.items():
            if len(packed):
                self._splits.setdefault(split, []).append(packed)
        self._num_sequences += len(block.members)
        self._num_residues += block.num_residues

    def write(self, work: BuildFolder, end: Place, sources: Sequence[SourceEntry]) -> None:
        """Writes a shard for each split that has a sequence, and then the journal's entry.

        Of all the sources that were read so far, those before `end` are recorded.
        """
        work.lock.check()
        before = work.journal.segments
        numbers = Counter(split for segment in before for split in segment.shards)
        shards = {
            split: write_shard(work.data, f"{split}/shard-{numbers[split]:05d}.h5", parts)
            for split, parts in sorted(self._splits.items())
        }
        if self._known is not None:
            digests = np.concatenate([np.zeros((0, 2), np.uint64), *self._first_seen])
            with new_part(work.first_seen(len(before))) as temporary:
                # numpy's own error on a full disk does not say that the disk is full.
                temporary.write_bytes(digests.tobytes())
        num_named = sum(len(segment.sources) for segment in before)
        work.journal.append(
            Segment(end, tuple(sources[num_named : end.source]), shards, self.tally)
        )
