"""The HDF5 file that `embed`, `attention` and `contacts` write: one entry per protein.

The name of an entry is the identifier of the protein, in which `/`, `%`, controls and names of dots
are escaped as %XX. The attributes of a data set contain the original identifier, the header and the
number of residues; those of the file the hashes of the model's weights and of the vocabulary.
Entries are in the order in which they were added. The attribute `skipped` of the file is a table of
the records without an entry, with the reasons.
"""

import io
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import h5py
import numpy as np

from protlm import __version__
from protlm.data.records import Record
from protlm.model.pretrained import PretrainedModel
from protlm.system.errors import OutputError
from protlm.system.paths import complete_file
from protlm.system.terminal import printable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

# HDF5 stores attributes in the header of an object, which has at most 64 KiB.
_LONGEST_HEADER = 30_000
_BYTES_PER_ENTRY = 2_048
# The type of text in HDF5 files.
TEXT = h5py.string_dtype()
_SKIPPED = np.dtype([("identifier", TEXT), ("reason", TEXT)])


def entry_name(identifier: str) -> str:
    r"""Escapes an identifier to a name that HDF5 does not split into levels, without controls.

    >>> entry_name("a/b"), entry_name(".."), entry_name("P12345.1"), entry_name("A\x1bB")
    ('a%2Fb', '%2E%2E', 'P12345.1', 'A%1BB')
    """
    name = identifier.replace("%", "%25").replace("/", "%2F")
    name = "".join(a if a == printable(a) else quote(a, errors="surrogatepass") for a in name)
    return name.replace(".", "%2E") if set(name) <= {"."} else name


class DiskFile(io.FileIO):
    """A new file for h5py that keeps data in memory when they cannot be written.

    The first failure is stored in `fault`, and raised by `check`. Call `check` after each write of
    a large array, which bounds the memory, and once more when the HDF5 file is closed.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w+")
        self.fault: OSError | None = None
        self._refused: list[tuple[int, bytes]] = []

    def check(self) -> None:
        if self.fault is not None:
            raise self.fault

    def write(self, data: "ReadableBuffer", /) -> int:
        """Writes all of `data` at the current position, on the disk or in memory."""
        content = memoryview(data).cast("B")
        place, done = self.tell(), 0
        try:
            while self.fault is None and done < len(content):
                done += os.pwrite(self.fileno(), content[done:], place + done)
        except OSError as error:
            self.fault = error
        if done < len(content):
            self._refused.append((place + done, bytes(content[done:])))
        self.seek(place + len(content))
        return len(content)

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        """Reads what was written; gaps are zero."""
        content = memoryview(buffer).cast("B")
        content[:] = bytes(len(content))
        place, done = self.tell(), 0
        while found := os.pread(self.fileno(), len(content) - done, place + done):
            content[done : done + len(found)] = found
            done += len(found)
        end = place + len(content)
        for start, refused in self._refused:
            first, last = max(place, start), min(end, start + len(refused))
            if first < last:
                content[first - place : last - place] = refused[first - start : last - start]
        self.seek(end)
        return len(content)

    def truncate(self, size: int | None = None, /) -> int:
        """Sets the size of the file, unless a write has failed."""
        size = self.tell() if size is None else size
        if self.fault is None:
            try:
                return super().truncate(size)
            except OSError as error:
                self.fault = error
        return size


class ProteinFile:
    """An open result file; entries are data sets, or groups of data sets."""

    def __init__(self, file: h5py.File, disk: DiskFile, renamed: Mapping[str, str]) -> None:
        self._file = file
        self._disk = disk
        self._renamed = renamed

    def add(
        self,
        record: Record,
        path: str,
        attributes: Mapping[str, object],
        *,
        data: np.ndarray | None = None,
        shape: tuple[int, ...] | None = None,
        dtype: str | None = None,
    ) -> h5py.Dataset:
        """Creates the data set `path` in the entry of a protein, or with "" the entry itself.

        The content is `data`, which takes half the time, or `shape` and `dtype`.
        """
        name = entry_name(record.identifier)
        full = f"{name}/{path}" if path else name
        dataset = self._file.create_dataset(full, shape=shape, dtype=dtype, data=data)
        own = {
            "original_id": sanitize(self._renamed.get(record.identifier, record.identifier)),
            "header": sanitize(record.header[:_LONGEST_HEADER]),
            "length": len(record.sequence),
        }
        dataset.attrs.update(own | dict(attributes))
        self._disk.check()
        return dataset

    def write(self, dataset: h5py.Dataset, values: np.ndarray, rows: slice) -> None:
        """Writes some rows, the second axis, of a map."""
        dataset[:, rows] = values
        self._disk.check()


def sanitize(text: str) -> str:
    """Escapes NUL characters, at which the strings of HDF5 end."""
    return text.replace("\0", "\\x00")


@contextmanager
def protein_file(
    path: Path,
    model: PretrainedModel,
    *,
    num_bytes: int,
    skipped: Sequence[tuple[str, str]] = (),
    renamed: Mapping[str, str] | None = None,
) -> Iterator[ProteinFile]:
    """Opens the result file of a model; the other arguments are those of `hdf5_file`."""
    attributes = {
        "model_hash": model.hash,
        "vocabulary_hash": model.vocabulary.hash,
        "protlm_version": __version__,
    }
    with hdf5_file(path, attributes, skipped, num_bytes=num_bytes) as (file, disk):
        yield ProteinFile(file, disk, renamed or {})


@contextmanager
def hdf5_file(
    path: Path,
    attributes: Mapping[str, object],
    skipped: Sequence[tuple[str, str]],
    *,
    num_bytes: int = 0,
    check: Callable[[], object] = lambda: None,
) -> Iterator[tuple[h5py.File, DiskFile]]:
    """Opens an HDF5 file; the `DiskFile` has to be checked after each write of a large array.

    `num_bytes`, about, are compared with the free space; `skipped` has identifiers and reasons.
    """
    with complete_file(path, check=check) as temporary:
        free = shutil.disk_usage(temporary.absolute().parent).free
        if num_bytes > free:
            raise OutputError(
                f"{path} needs {num_bytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; "
                "choose another disk, or fewer proteins, layers or heads"
            )
        with DiskFile(temporary) as disk:
            with h5py.File(disk, "w", libver="v110", track_order=True) as file:
                file.attrs.update(attributes)
                disk.check()
                yield file, disk
                rows = [(sanitize(identifier), sanitize(why)) for identifier, why in skipped]
                file.attrs["skipped"] = np.array(rows, dtype=_SKIPPED)
            disk.check()


def entry_bytes(num_entries: int, num_values: int, dtype: str) -> int:
    """Estimates the size of a result file in bytes."""
    return num_entries * _BYTES_PER_ENTRY + num_values * np.dtype(dtype).itemsize
