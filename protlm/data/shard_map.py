"""A shard mapped into memory: HDF5 says where the four arrays are, and reads nothing of them.

An HDF5 file can be made to read other files or to break its reader, so a file is opened only when
it has the size that the manifest says, and whatever could lead elsewhere is refused.
"""

import mmap
from pathlib import Path
from typing import NamedTuple, TypeAlias

import h5py
import numpy as np

from protlm.data.manifest import ShardEntry
from protlm.data.vocabulary import VOCABULARY
from protlm.errors import InputDataError

ARRAYS = {"tokens": "u1", "offsets": "<u8", "ids": "u1", "id_offsets": "<u8"}

# First byte and end of each array in the file.
Places: TypeAlias = dict[str, tuple[int, int]]


class MappedShard(NamedTuple):
    """The arrays of one shard, read-only views of its memory map.

    Only the ends of the offsets were looked at: what lies between is checked where it is used, so
    that a shard is opened without reading it.
    """

    path: Path
    tokens: np.ndarray
    offsets: np.ndarray
    ids: np.ndarray
    id_offsets: np.ndarray

    def sequence(self, row: int) -> np.ndarray:
        """Tokens of the residues of a sequence, uint8, a read-only view.

        Raises:
            InputDataError: its offsets lead astray.
        """
        return self._part(self.tokens, self.offsets, row)

    def identifier(self, row: int) -> bytes:
        """The identifier of a sequence.

        Raises:
            InputDataError: its offsets lead astray.
        """
        return self._part(self.ids, self.id_offsets, row).tobytes()

    def lengths(self, rows: np.ndarray | slice) -> np.ndarray:
        """Residues of these sequences, int64.

        Raises:
            InputDataError: their offsets lead astray.
        """
        starts, stops = self.offsets[:-1][rows], self.offsets[1:][rows]
        if np.any(stops < starts) or np.any(stops > len(self.tokens)):
            raise InputDataError(self._astray())
        return (stops - starts).astype(np.int64)

    def check(self) -> None:
        """Looks at everything: the offsets never go back, the tokens are residues.

        Raises:
            InputDataError: they do, or there is another token.
        """
        for offsets in (self.offsets, self.id_offsets):
            if np.any(offsets[1:] < offsets[:-1]):
                raise InputDataError(self._astray())
        # The numbers of residues follow one another, and extremes are found at the speed of memory.
        first, last = VOCABULARY.residues[[0, -1]]
        if self.tokens.size and (self.tokens.min() < first or self.tokens.max() > last):
            raise InputDataError(f"the shard {self.path} holds tokens that are no residues")

    def _part(self, content: np.ndarray, offsets: np.ndarray, row: int) -> np.ndarray:
        start, stop = int(offsets[row]), int(offsets[row + 1])
        if not start <= stop <= len(content):
            raise InputDataError(self._astray())
        return content[start:stop]

    def _astray(self) -> str:
        return f"the shard {self.path} is no shard of protlm (the offsets go back)"


def find_arrays(path: Path, entry: ShardEntry) -> Places:
    """Asks HDF5 where the arrays of a shard are; reads none of them.

    Raises:
        InputDataError: the file is no shard, or not the one that the manifest means.
    """
    if fault := size_fault(path, entry):
        raise InputDataError(fault)
    try:
        with h5py.File(path, "r", locking=False) as file:
            return {name: _place(file, name, entry.bytes) for name in ARRAYS}
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise InputDataError(f"the shard {path} is no shard of protlm ({error})") from error


def map_shard(
    path: Path, entry: ShardEntry, places: Places, *, shuffled: bool = False
) -> MappedShard:
    """Maps a shard into memory.

    Args:
        path: the file.
        entry: what the manifest says of it.
        places: where `find_arrays` found the arrays.
        shuffled: sequences will be asked for in a random order: nothing around them is read too.

    Raises:
        InputDataError: the file cannot be read, or is not the one that the manifest means.
    """
    if fault := size_fault(path, entry):
        raise InputDataError(fault)
    try:
        with path.open("rb") as file:
            raw = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise InputDataError(f"the shard {path} cannot be read: {error}") from error
    if shuffled and hasattr(mmap, "MADV_RANDOM"):
        # The kernel would read 128 KiB for each sequence of some hundred bytes.
        raw.madvise(mmap.MADV_RANDOM)
    shard = MappedShard(
        path,
        *(np.frombuffer(raw, np.uint8)[a:b].view(ARRAYS[name]) for name, (a, b) in places.items()),
    )
    if fault := _misfit(shard, entry):
        raise InputDataError(f"the shard {path} is no shard of protlm ({fault})")
    return shard


def size_fault(path: Path, entry: ShardEntry) -> str:
    """Why a file cannot be the shard that the manifest means, by its size alone, or nothing."""
    try:
        if not path.is_file():
            return f"the shard {path} is missing"
        if (size := path.stat().st_size) != entry.bytes:
            return f"the shard {path} has {size:,} bytes and ought to have {entry.bytes:,}"
    except OSError as error:
        return f"the shard {path} cannot be read: {error.strerror}"
    return ""


def _place(file: h5py.File, name: str, size: int) -> tuple[int, int]:
    """First byte and end of an array in the file; refuses whatever could lead elsewhere."""
    if not isinstance(file.get(name, getlink=True), h5py.HardLink):
        raise ValueError(f"{name} is missing or a link")
    dataset = file[name]
    if not isinstance(dataset, h5py.Dataset):
        raise ValueError(f"{name} is no array")
    layout = dataset.id.get_create_plist()
    if layout.get_layout() != h5py.h5d.CONTIGUOUS or layout.get_external_count():
        raise ValueError(f"{name} is not stored contiguously in this file")
    type_ours = h5py.h5t.py_create(np.dtype(ARRAYS[name]))
    if not dataset.id.get_type().equal(type_ours) or dataset.ndim != 1:
        raise ValueError(f"{name} is {dataset.dtype} of shape {dataset.shape}")
    if dataset.size == 0:
        return 0, 0
    start = dataset.id.get_offset()
    if start is None or start + dataset.nbytes > size:
        raise ValueError(f"{name} lies outside the file")
    return start, start + dataset.nbytes


def _misfit(shard: MappedShard, entry: ShardEntry) -> str:
    """What the arrays say that the manifest does not, or nothing."""
    if len(shard.tokens) != entry.residues:
        return f"{len(shard.tokens)} residues instead of {entry.residues}"
    for offsets, content in ((shard.offsets, shard.tokens), (shard.id_offsets, shard.ids)):
        if len(offsets) != entry.sequences + 1 or offsets[0] != 0 or offsets[-1] != len(content):
            return "the offsets do not cover the array"
    return ""
