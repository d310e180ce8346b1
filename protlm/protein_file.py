"""The HDF5 file that `embed`, `attention` and `contacts` write: one entry per protein.

An entry's name is the protein's identifier with `/`, `%` and names of dots written as %XX; the
identifier and the header as they came stand in its attributes, with the hashes of the model's
weights and of the vocabulary.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np

from protlm import __version__
from protlm.data.records import Record
from protlm.data.vocabulary import VOCABULARY
from protlm.errors import OutputError
from protlm.model.pretrained import PretrainedModel
from protlm.paths import complete_file

# HDF5 keeps an attribute in the object's header, which holds at most 64 KiB.
_LONGEST_HEADER = 30_000
_BYTES_PER_ENTRY = 2_048


def entry_name(identifier: str) -> str:
    """A name HDF5 takes as one level, from which the identifier can be read back.

    >>> entry_name("a/b"), entry_name(".."), entry_name("P12345.1")
    ('a%2Fb', '%2E%2E', 'P12345.1')
    """
    name = identifier.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")
    return name.replace(".", "%2E") if set(name) <= {"."} else name


class ProteinFile:
    """An open file of results; entries are data sets, or groups of data sets."""

    def __init__(self, file: h5py.File, model_hash: str) -> None:
        self._file = file
        self._model_hash = model_hash

    def add(
        self,
        record: Record,
        path: str,
        *,
        shape: tuple[int, ...],
        dtype: str,
        attributes: dict[str, object],
    ) -> h5py.Dataset:
        """Makes the data set `path` of a protein's entry (or, if empty, the entry itself)."""
        name = entry_name(record.identifier)
        full = f"{name}/{path}" if path else name
        dataset = self._file.create_dataset(full, shape=shape, dtype=np.dtype(dtype))
        own = {
            "identifier": record.identifier,
            "header": record.header[:_LONGEST_HEADER],
            "model_hash": self._model_hash,
            "vocabulary_hash": VOCABULARY.hash,
        }
        for key, value in (own | attributes).items():
            dataset.attrs[key] = value
        return dataset


@contextmanager
def protein_file(path: Path, model: PretrainedModel, *, num_bytes: int) -> Iterator[ProteinFile]:
    """Opens a file of results; it gets its name only when it is complete.

    Args:
        path: the file to be.
        model: what the results come from.
        num_bytes: how much will be written, so that a full disk is found out first.

    Raises:
        OutputError: the file exists already, or there is no space or permission.
    """
    with complete_file(path) as temporary:
        free = shutil.disk_usage(temporary.absolute().parent).free
        if num_bytes > free:
            raise OutputError(
                f"{path} would take {num_bytes / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; "
                "choose another disk, or fewer proteins, layers or heads"
            )
        with h5py.File(temporary, "w", libver="v110", track_order=True) as file:
            model_hash = model.hash
            file.attrs["model_hash"] = model_hash
            file.attrs["vocabulary_hash"] = VOCABULARY.hash
            file.attrs["protlm_version"] = __version__
            yield ProteinFile(file, model_hash)


def entry_bytes(num_entries: int, num_values: int, dtype: str) -> int:
    """About how much a file of results takes."""
    return num_entries * _BYTES_PER_ENTRY + num_values * np.dtype(dtype).itemsize
