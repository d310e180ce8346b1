"""Shards are written here: HDF5 lays out the file, and the arrays go to where it says."""

import hashlib
import io
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

import h5py
import numpy as np

from protlm.data.manifest import ShardEntry
from protlm.data.shard_map import ARRAYS
from protlm.data.vocabulary import VOCABULARY
from protlm.paths import complete_file

# Readers map the arrays into memory, where aligned numbers are faster.
_ALIGNMENT = 64

_Content: TypeAlias = bytes | memoryview


@dataclass(frozen=True)
class PackedSequences:
    """Sequences end to end, in the form in which a shard holds them.

    Args:
        tokens: the residues, uint8 [residues].
        lengths: residues of each sequence, uint32 [sequences].
        ids: the identifiers in UTF-8, uint8 [bytes].
        id_lengths: bytes of each identifier, uint32 [sequences].
    """

    tokens: np.ndarray
    lengths: np.ndarray
    ids: np.ndarray
    id_lengths: np.ndarray

    @classmethod
    def pack(cls, identifiers: Sequence[str], sequences: Sequence[bytes]) -> Self:
        """Encodes sequences of residue letters in ASCII, all at once.

        Raises:
            InputDataError: a letter is no residue.
        """
        names = [identifier.encode() for identifier in identifiers]
        return cls(
            tokens=VOCABULARY.encode(b"".join(sequences)),
            lengths=np.fromiter(map(len, sequences), np.uint32, len(sequences)),
            ids=np.frombuffer(b"".join(names), np.uint8),
            id_lengths=np.fromiter(map(len, names), np.uint32, len(names)),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def keep(self, is_kept: np.ndarray) -> "PackedSequences":
        """Those sequences alone where `is_kept`, bool [sequences], is true."""
        return PackedSequences(
            self.tokens[np.repeat(is_kept, self.lengths)],
            self.lengths[is_kept],
            self.ids[np.repeat(is_kept, self.id_lengths)],
            self.id_lengths[is_kept],
        )


def write_shard(directory: Path, file: str, parts: Sequence[PackedSequences]) -> ShardEntry:
    """Writes sequences as one shard; the same sequences give the same bytes.

    HDF5 never sees the disk: on a full one it leaves a broken file and crashes at exit.

    Args:
        directory: the folder of the data set.
        file: the name of the shard within it, for instance `train/shard-00000.h5`.
        parts: the sequences; their arrays are written from where they are.

    Raises:
        OutputError: there is no space or no permission; nothing is left of the shard.
    """
    offsets = _offsets([part.lengths for part in parts])
    id_offsets = _offsets([part.id_lengths for part in parts])
    arrays: dict[str, list[np.ndarray]] = {
        "tokens": [part.tokens for part in parts],
        "offsets": [offsets],
        "ids": [part.ids for part in parts],
        "id_offsets": [id_offsets],
    }
    path = directory / file
    path.parent.mkdir(parents=True, exist_ok=True)
    contents = list(_contents(arrays))
    # The disk is waited for while another thread hashes.
    with ThreadPoolExecutor(1) as thread:
        sha256 = thread.submit(_sha256, contents)
        with complete_file(path) as temporary, temporary.open("xb") as out:
            out.writelines(contents)
    size = sum(map(len, contents))
    return ShardEntry(file, len(offsets) - 1, int(offsets[-1]), size, sha256.result())


def _sha256(contents: list[_Content]) -> str:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content)
    return digest.hexdigest()


def _offsets(lengths: list[np.ndarray]) -> np.ndarray:
    """Where each of the sequences begins, and where the last one ends, uint64 [sequences + 1]."""
    offsets = np.zeros(sum(map(len, lengths)) + 1, "<u8")
    np.cumsum(np.concatenate(lengths), out=offsets[1:])
    return offsets


def _contents(arrays: dict[str, list[np.ndarray]]) -> Iterator[_Content]:
    """The file from its first byte to its last: HDF5's records, the arrays, and the gaps."""
    layout = _Layout()
    pieces: list[tuple[int, Iterable[_Content]]] = []
    # Format 1.8 is the oldest that needs no chunks here, and the newest without a time in it.
    with h5py.File(
        layout,
        "w",
        libver=("v108", "v108"),
        track_order=False,
        alignment_threshold=1,
        alignment_interval=_ALIGNMENT,
    ) as file:
        for name, parts in arrays.items():
            start = _place(file, name, sum(map(len, parts)))
            if start is not None:
                pieces.append((start, (part.view(np.uint8).data for part in parts)))
    pieces += [(start, (record,)) for start, record in layout.records()]
    end = 0
    for start, contents in sorted(pieces, key=lambda piece: piece[0]):
        yield bytes(start - end)
        end = start
        for content in contents:
            yield content
            end += len(content)
    yield bytes(layout.size - end)


def _place(file: h5py.File, name: str, size: int) -> int | None:
    """Gives an array its room in the file, and returns its first byte; an empty one has none."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    properties.set_obj_track_times(False)
    kind = h5py.h5t.py_create(np.dtype(ARRAYS[name]))
    space = h5py.h5s.create_simple((size,))
    return h5py.h5d.create(file.id, name.encode(), kind, space, properties).get_offset()


class _Layout(io.RawIOBase):
    """The file as HDF5 writes it, without the arrays: a few small records and a size."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}
        self._position = 0
        self.size = 0

    def records(self) -> list[tuple[int, bytes]]:
        """What was written, as runs of bytes and where they begin."""
        runs: list[tuple[int, bytearray]] = []
        for position, value in sorted(self._bytes.items()):
            if not runs or position != runs[-1][0] + len(runs[-1][1]):
                runs.append((position, bytearray()))
            runs[-1][1].append(value)
        return [(start, bytes(run)) for start, run in runs]

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def write(self, content: Any, /) -> int:
        record = bytes(content)
        self._bytes.update(enumerate(record, start=self._position))
        self._position += len(record)
        self.size = max(self.size, self._position)
        return len(record)

    def truncate(self, size: int | None = None, /) -> int:
        self.size = self._position if size is None else size
        return self.size

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True
