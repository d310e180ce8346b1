"""HDF5 shards: written once from memory, checked against the manifest, read by memory map."""

import hashlib
import io
import os
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from protlm.data.manifest import MANIFEST, Manifest, ShardEntry, read_manifest
from protlm.data.vocabulary import VOCABULARY
from protlm.errors import InputDataError, UserError, one_of
from protlm.paths import sha256_of

__all__ = [
    "Manifest",
    "ShardEntry",
    "ShardWriter",
    "SplitReader",
    "open_split",
    "read_manifest",
    "verify",
]

REPORT, REJECTED = "report.json", "rejected.tsv"
_DTYPES = {"tokens": np.uint8, "offsets": np.uint64, "ids": np.uint8, "id_offsets": np.uint64}
_ENCODE = 1 << 24


class ShardWriter:
    """Collects sequences in memory and writes them as one shard at a time.

    Args:
        directory: the folder of the data set.
        split: the name of the split, also of its folder.
    """

    def __init__(self, directory: Path, split: str) -> None:
        self._directory, self._split = directory, split
        self.entries: list[ShardEntry] = []
        self._clear()

    def _clear(self) -> None:
        self._letters, self._ids = bytearray(), bytearray()
        self._offsets, self._id_offsets = array("Q", [0]), array("Q", [0])

    @property
    def num_residues(self) -> int:
        """Residues that wait to be written."""
        return len(self._letters)

    def add(self, identifier: str, sequence: str) -> None:
        """Appends a sequence of residue letters."""
        self._letters += sequence.encode("ascii")
        self._offsets.append(len(self._letters))
        self._ids += identifier.encode()
        self._id_offsets.append(len(self._ids))

    def flush(self) -> None:
        """Writes what waits as the next shard; nothing if nothing waits.

        HDF5 never sees the disk: on a full one it leaves a broken file and crashes at exit. What
        is written here gets its final name with the folder, when the whole data set is complete.
        """
        if len(self._offsets) == 1:
            return
        file = f"{self._split}/shard-{len(self.entries):05d}.h5"
        image = self._image()
        path = self._directory / file
        path.parent.mkdir(exist_ok=True)
        with path.open("xb") as out:
            out.write(image)
            out.flush()
            os.fsync(out.fileno())
        sha256 = hashlib.sha256(image).hexdigest()
        self.entries.append(
            ShardEntry(file, len(self._offsets) - 1, len(self._letters), len(image), sha256)
        )
        self._clear()

    def _image(self) -> memoryview:
        """The bytes of the HDF5 file, the same for the same sequences."""
        buffer = io.BytesIO()
        with h5py.File(buffer, "w", libver=("v108", "v108"), track_order=False) as file:
            tokens = _contiguous(file, "tokens", len(self._letters))
            for start in range(0, len(self._letters), _ENCODE):
                part = self._letters[start : start + _ENCODE].decode("ascii")
                tokens[start : start + len(part)] = VOCABULARY.encode(part)
            _contiguous(file, "offsets", len(self._offsets))[:] = self._offsets
            _contiguous(file, "ids", len(self._ids))[:] = np.frombuffer(self._ids, np.uint8)
            _contiguous(file, "id_offsets", len(self._id_offsets))[:] = self._id_offsets
        return buffer.getbuffer()


def _contiguous(file: h5py.File, name: str, size: int) -> h5py.Dataset:
    dtype = np.dtype(_DTYPES[name]).newbyteorder("<")
    return file.create_dataset(name, (size,), dtype, track_times=False)


class _Shard(NamedTuple):
    """The arrays of one shard, views of its memory map."""

    tokens: np.ndarray
    offsets: np.ndarray
    ids: np.ndarray
    id_offsets: np.ndarray


class SplitReader:
    """Random access to the sequences of one split.

    Shards are mapped into memory when first asked for, in each process anew; a pickled reader
    takes no maps along.

    Args:
        directory: the folder of the data set.
        shards: the entries of the split in the manifest, in order.
    """

    def __init__(self, directory: Path, shards: Sequence[ShardEntry]) -> None:
        self._directory, self._shards = directory, tuple(shards)
        counts = np.array([shard.sequences for shard in shards], dtype=np.int64)
        self._ends: list[int] = np.cumsum(counts).tolist()
        self._maps: dict[int, _Shard] = {}
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__ | {"_maps": {}}
        state.pop("lengths", None)
        return state

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> np.ndarray:
        """Tokens of the residues of a sequence, uint8, a read-only view."""
        shard, row = self._locate(index)
        return shard.tokens[int(shard.offsets[row]) : int(shard.offsets[row + 1])]

    def identifier(self, index: int) -> str:
        """The accession, or whatever the record was called."""
        shard, row = self._locate(index)
        name = shard.ids[int(shard.id_offsets[row]) : int(shard.id_offsets[row + 1])]
        return name.tobytes().decode("utf-8", "backslashreplace")

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the hashes of the shards, in order: what a place in the data refers to."""
        return hashlib.sha256("\n".join(s.sha256 for s in self._shards).encode()).hexdigest()

    @cached_property
    def lengths(self) -> np.ndarray:
        """Residues of each sequence, int64 [num_sequences]."""
        shards = (self._shard(number) for number in range(len(self._shards)))
        lengths = [np.diff(shard.offsets).astype(np.int64) for shard in shards]
        return np.concatenate(lengths) if lengths else np.zeros(0, np.int64)

    def _locate(self, index: int) -> tuple[_Shard, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        number = bisect_right(self._ends, index)
        return self._shard(number), index - (self._ends[number - 1] if number else 0)

    def _shard(self, number: int) -> _Shard:
        if self._pid != os.getpid():
            self._maps, self._pid = {}, os.getpid()
        if number not in self._maps:
            self._maps[number] = _map_shard(self._directory, self._shards[number])
        return self._maps[number]


def open_split(directory: Path, split: str, *, verify: str = "full") -> SplitReader:
    """Opens a split after checking its shards.

    Args:
        directory: the folder of the data set.
        split: the name of the split.
        verify: `full` compares sizes and hashes with the manifest, `sizes` the sizes alone.

    Raises:
        UserError: no data set, no such split, or another `verify`.
        InputDataError: a shard is missing or damaged.
    """
    manifest = read_manifest(directory)
    if split not in manifest.splits:
        raise UserError(
            f"{directory} has no split {split!r}; it has: {one_of(list(manifest.splits))}"
        )
    if verify not in ("full", "sizes"):
        raise UserError(f"verify={verify} is unknown; choose one of: full, sizes")
    for entry in manifest.splits[split]:
        fault = _fault(directory, entry, is_hashed=verify == "full")
        if fault:
            raise InputDataError(
                f"{fault}; see: protlm data verify {directory}; or make the data set again"
            )
    return SplitReader(directory, manifest.splits[split])


def verify(directory: Path) -> list[str]:
    """Checks all of a data set: one sentence per fault, none when all is well.

    Raises:
        UserError: there is no data set, or no manifest that could be compared.
    """
    manifest = read_manifest(directory)
    entries = [entry for shards in manifest.splits.values() for entry in shards]
    expected = {entry.file for entry in entries} | {MANIFEST, REPORT, REJECTED}
    faults = []
    for entry in entries:
        fault = _fault(directory, entry, is_hashed=True) or _unreadable(directory, entry)
        if fault:
            faults.append(fault)
    for path in sorted(directory.rglob("*")):
        file = path.relative_to(directory).as_posix()
        if not path.is_dir() and file not in expected:
            faults.append(f"{path} is not in the manifest")
    return faults


def _fault(directory: Path, entry: ShardEntry, *, is_hashed: bool) -> str:
    """Why a file is not the shard that the manifest means, or nothing."""
    path = directory / entry.file
    try:
        if not path.is_file():
            return f"the shard {path} is missing"
        if (size := path.stat().st_size) != entry.bytes:
            return f"the shard {path} has {size:,} bytes and ought to have {entry.bytes:,}"
        if is_hashed and sha256_of(path) != entry.sha256:
            return f"the shard {path} is damaged or another one: its SHA-256 differs"
    except OSError as error:
        return f"the shard {path} cannot be read: {error.strerror}"
    return ""


def _unreadable(directory: Path, entry: ShardEntry) -> str:
    try:
        shard = _map_shard(directory, entry)
    except InputDataError as error:
        return str(error)
    # The numbers of residues follow one another, and extremes are found at the speed of memory.
    first, last = VOCABULARY.residues[[0, -1]]
    if shard.tokens.size and (shard.tokens.min() < first or shard.tokens.max() > last):
        return f"the shard {directory / entry.file} holds tokens that are no residues"
    return ""


def _map_shard(directory: Path, entry: ShardEntry) -> _Shard:
    """Maps a shard into memory; HDF5 itself reads nothing but where the four arrays are.

    Raises:
        InputDataError: the file is no shard, or not the one that the manifest means.
    """
    path = directory / entry.file
    if fault := _fault(directory, entry, is_hashed=False):
        raise InputDataError(fault)
    try:
        with h5py.File(path, "r", locking=False) as file:
            places = {name: _place(file, name, entry.bytes) for name in _DTYPES}
        raw = np.asarray(np.memmap(path, np.uint8, mode="r"))
        shard = _Shard(
            *(raw[start:stop].view(_DTYPES[name]) for name, (start, stop) in places.items())
        )
        _check_offsets(shard.offsets, len(shard.tokens), entry.sequences)
        _check_offsets(shard.id_offsets, len(shard.ids), entry.sequences)
        if len(shard.tokens) != entry.residues:
            raise ValueError(f"{len(shard.tokens)} residues instead of {entry.residues}")
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise InputDataError(f"the shard {path} is no shard of protlm ({error})") from error
    return shard


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
    if dataset.dtype != np.dtype(_DTYPES[name]).newbyteorder("<") or dataset.ndim != 1:
        raise ValueError(f"{name} is {dataset.dtype}{list(dataset.shape)}")
    start = dataset.id.get_offset()
    if start is None or start + dataset.nbytes > size:
        raise ValueError(f"{name} lies outside the file")
    return start, start + dataset.nbytes


def _check_offsets(offsets: np.ndarray, size: int, num_sequences: int) -> None:
    if len(offsets) != num_sequences + 1 or offsets[0] != 0 or offsets[-1] != size:
        raise ValueError("the offsets do not cover the array")
    if np.any(offsets[1:] < offsets[:-1]):
        raise ValueError("the offsets go back")
