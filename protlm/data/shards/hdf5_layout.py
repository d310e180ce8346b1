"""Files of contiguous arrays, whose HDF5 metadata is created in memory."""

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import h5py
import numpy as np

# Readers map the arrays into memory, where aligned access is faster.
_ALIGNMENT = 64

Content: TypeAlias = bytes | memoryview


@dataclass(frozen=True)
class Array:
    """A one-dimensional array of a file.

    Args:
        kind: numpy's name of its type.
        size: number of elements.
        pieces: its bytes in order; they may be read from disk lazily.
    """

    kind: str
    size: int
    pieces: Iterable[Content]


def contents(arrays: dict[str, Array]) -> Iterator[Content]:
    """Yields the bytes of the file: HDF5 metadata, the arrays, and the gaps between them."""
    layout = _MetadataFile()
    pieces: list[tuple[int, Iterable[Content]]] = []
    # Format 1.8 is the oldest that needs no chunks here, and the newest without timestamps.
    with h5py.File(
        layout,
        "w",
        libver=("v108", "v108"),
        track_order=False,
        alignment_threshold=1,
        alignment_interval=_ALIGNMENT,
    ) as file:
        for name, array in arrays.items():
            start = _place(file, name, array)
            if start is not None:
                pieces.append((start, array.pieces))
    pieces += [(start, (record,)) for start, record in layout.records()]
    end = 0
    for start, some in sorted(pieces, key=lambda piece: piece[0]):
        yield bytes(start - end)
        end = start
        for content in some:
            yield content
            end += len(content)
    yield bytes(layout.size - end)


def _place(file: h5py.File, name: str, array: Array) -> int | None:
    """Allocates an array in the file, and returns its offset; None if the array is empty."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    properties.set_obj_track_times(False)
    kind = h5py.h5t.py_create(np.dtype(array.kind))
    space = h5py.h5s.create_simple((array.size,))
    return h5py.h5d.create(file.id, name.encode(), kind, space, properties).get_offset()


class _MetadataFile(io.RawIOBase):
    """An in-memory file that stores the metadata which HDF5 writes, and the file size."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}
        self._position = 0
        self.size = 0

    def records(self) -> list[tuple[int, bytes]]:
        """Returns the written bytes as contiguous runs with their offsets."""
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
