"""Segments: the records between two points from which a killed build can resume.

The journal has one small file for each finished segment, written after its shards.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from protlm.data.records import Tally
from protlm.data.shards.manifest import ShardEntry, SourceEntry
from protlm.data.shards.writer import PackedSequences, write_shard
from protlm.system.errors import InputDataError
from protlm.system.json_file import Sha256, from_json, to_json
from protlm.system.paths import complete_file

from .duplicates import DigestSet
from .encode import EncodedBlock
from .sources import Place
from .work_folder import BuildFolder

DUPLICATE = "duplicate sequence"
# Short sequences take more memory than their residues: identifiers, offsets and digests.
_MAX_SEQUENCES = 1 << 22
_NAME = "segment-{:05d}.json"
_PATTERN = re.compile(r"segment-(\d{5,})\.json")
T = TypeVar("T")


class OpenSegment:
    """Collects blocks, in the order of the input, until they are written as one segment.

    Args:
        known: digests of earlier sequences, to remove duplicates; None keeps all sequences.
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
        """Adds a block."""
        self.tally.add(block.tally)
        if self._known is not None:
            block = self._without_duplicates(block, self._known)
        for split, packed in block.splits.items():
            if len(packed):
                self._splits.setdefault(split, []).append(packed)
        self._num_sequences += len(block.members)
        self._num_residues += block.num_residues

    def _without_duplicates(self, block: EncodedBlock, known: DigestSet) -> EncodedBlock:
        is_new = known.add(block.digests)
        self._first_seen.append(block.digests[is_new])
        num_copies = len(is_new) - int(np.count_nonzero(is_new))
        if not num_copies:
            return block
        self.tally.filtered[DUPLICATE] += num_copies
        return block.keep(is_new)

    def write(self, work: BuildFolder, end: Place, sources: Sequence[SourceEntry]) -> None:
        """Writes a shard for each split that has a sequence, and then the journal's entry.

        Args:
            work: the work folder.
            end: position in the sources after the last block.
            sources: all sources that were read so far; those before `end` are recorded.
        """
        work.lock.check()
        before = work.journal.segments
        numbers = Counter(split for segment in before for split in segment.shards)
        shards = {
            split: write_shard(work.data, f"{split}/shard-{numbers[split]:05d}.h5", parts)
            for split, parts in sorted(self._splits.items())
        }
        digests = work.first_seen(len(before))
        sha256 = None if self._known is None else self._write_first_seen(digests)
        num_named = sum(len(segment.sources) for segment in before)
        finished = tuple(sources[num_named : end.source])
        work.journal.append(Segment(end, finished, shards, self.tally, sha256))

    def _write_first_seen(self, path: Path) -> str:
        """Writes the digests of the segment's sequences, and returns the SHA-256 of the file."""
        digests = np.concatenate([np.zeros((0, 2), np.uint64), *self._first_seen]).tobytes()
        with complete_file(path) as temporary:
            # numpy's own error on a full disk does not say that the disk is full.
            temporary.write_bytes(digests)
        return hashlib.sha256(digests).hexdigest()


def known_before(work: BuildFolder) -> DigestSet:
    """Returns the digests of all sequences in the finished segments."""
    known = DigestSet(work.known_digests)
    for number in range(len(work.journal.segments)):
        known.add(work.read_first_seen(number))
    return known


@dataclass(frozen=True)
class Segment:
    """A finished segment.

    Args:
        end: position in the sources after it.
        sources: sources before this position that no earlier segment lists.
        shards: the shard of each split.
        tally: counts of its records.
        digests_sha256: SHA-256 of the file with the digests of its sequences; None if duplicates
            are not looked for.
    """

    end: Place
    sources: tuple[SourceEntry, ...]
    shards: dict[str, ShardEntry]
    tally: Tally
    digests_sha256: Sha256 | None


class Journal:
    """The finished segments of a build, in order.

    Args:
        folder: folder of the entries, one file each.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)
        numbers = [int(m[1]) for path in folder.iterdir() if (m := _PATTERN.fullmatch(path.name))]
        self.segments = [
            read_checked(folder / _NAME.format(number), partial(from_json, Segment))
            for number in range(max(numbers, default=-1) + 1)
        ]

    def append(self, segment: Segment) -> None:
        """Writes the entry of the next segment, whose shards are complete."""
        write_checked(self._folder / _NAME.format(len(self.segments)), to_json(segment))
        self.segments.append(segment)


def write_checked(path: Path, fields: dict[str, Any]) -> None:
    """Writes JSON with its SHA-256 atomically."""
    content = {"sha256": _hash(fields), "content": fields}
    with complete_file(path) as temporary:
        temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")


def read_checked(path: Path, parse: Callable[[dict[str, Any]], T]) -> T:
    """Reads a file written by `write_checked`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["sha256"] != _hash(content["content"]):
            raise ValueError("its SHA-256 does not match")
        return parse(content["content"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputDataError(
            f"{path} is missing or damaged ({error}): the build cannot be resumed; type the same "
            "command with --restart"
        ) from error


def _hash(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
