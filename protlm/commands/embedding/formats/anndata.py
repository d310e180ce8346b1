"""AnnData (`.h5ad`), which scanpy and other single-cell tools read: a row for each protein.

`X` has the vectors; with several kinds or layers they are in `obsm`, as KIND_LAYER. `obs` has the
identifiers as its index, `original_id` and `length`, and `uns["protlm"]` in JSON what other formats
have as attributes. The layout is that of anndata's specification of files, version 0.1.0; anndata
itself is not needed.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from protlm.commands.embedding.formats.ragged import fill
from protlm.commands.embedding.job import Job, Key, stored
from protlm.commands.embedding.results import Results
from protlm.commands.hdf5_output import TEXT, hdf5_file

SUFFIXES, WHAT = (".h5ad",), "an AnnData file"
_ARRAY, _TEXTS = ("array", "0.2.0"), ("string-array", "0.2.0")


def write(results: Results, output: Path) -> None:
    """Writes the rows in the order of the input."""
    job, number = results.job, len(results)
    with hdf5_file(output, job.attributes, results.skipped, check=results.check) as (file, disk):
        columns, arrays = _obs(file, number), _arrays(file, job, number)
        _encoded(file, ("anndata", "0.1.0"))
        about = file.create_dataset("uns/protlm", data=json.dumps(results.attributes()))
        _encoded(about, ("string", "0.2.0"))
        fill(results, columns, arrays, disk)


def _obs(file: Any, number: int) -> list[Any]:
    """Creates the table of the proteins; returns its columns: index, original names, lengths."""
    frame = _frame(file, "obs", ["original_id", "length"])
    texts = [
        _encoded(frame.create_dataset(name, number, TEXT), _TEXTS)
        for name in ("_index", "original_id")
    ]
    return [*texts, _encoded(frame.create_dataset("length", number, "int64"), _ARRAY)]


def _arrays(file: Any, job: Job, number: int) -> dict[Key, Any]:
    """Creates the matrices, and for `X` the table of its columns."""
    columns = np.arange(job.width if job.options.is_single else 0).astype(str).astype(object)
    _encoded(_frame(file, "var", []).create_dataset("_index", data=columns, dtype=TEXT), _TEXTS)
    for name in ("layers", "obsm", "obsp", "varm", "varp", "uns"):
        _encoded(file.create_group(name), ("dict", "0.1.0"))
    names = {
        key: "X" if job.options.is_single else f"obsm/{key[0].value}_{key[1]}" for key in job.keys
    }
    shape, dtype = (number, job.width), stored(job.options.dtype)
    return {
        key: _encoded(file.create_dataset(name, shape, dtype), _ARRAY)
        for key, name in names.items()
    }


def _frame(file: Any, name: str, columns: Sequence[str]) -> Any:
    frame = _encoded(file.create_group(name), ("dataframe", "0.2.0"))
    frame.attrs["_index"] = "_index"
    frame.attrs["column-order"] = np.array(columns, dtype=TEXT)
    return frame


def _encoded(element: Any, encoding: tuple[str, str]) -> Any:
    """Returns an element of the file after marking it with its kind and the kind's version."""
    element.attrs["encoding-type"], element.attrs["encoding-version"] = encoding
    return element
