"""A NumPy archive with the arrays of the format ragged, and `metadata`, a text in JSON.

Nothing in it is pickled: `np.load(path)` reads it. It is written array by array, in blocks.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile, ZipInfo

import numpy as np

from protlm.commands.embedding.formats.ragged import group_of
from protlm.commands.embedding.job import stored
from protlm.commands.embedding.results import Results, end_to_end
from protlm.system.paths import complete_file
from protlm.system.terminal import watched

SUFFIXES, WHAT = (".npz",), "a NumPy archive"


def write(results: Results, output: Path) -> None:
    """Writes the arrays in the order of the input."""
    job = results.job
    with complete_file(output, check=results.check) as file, ZipFile(file, "w") as archive:
        _add(archive, "metadata", np.array(json.dumps(results.attributes())))
        proteins = [(p.record.identifier, p.original_id, len(p.record.sequence)) for p in results]
        ids, original, lengths = zip(*proteins, strict=True) if proteins else ((), (), ())
        _add(archive, "ids", np.array(ids, np.str_))
        _add(archive, "original_ids", np.array(original, np.str_))
        _add(archive, "lengths", np.array(lengths, np.int64))
        for kind, layer in watched("arrays written", job.keys):
            group, rows = group_of(job, (kind, layer)), results.offsets(kind)
            if kind.is_matrix:
                _add(archive, f"{group}offsets", rows)
            blocks = (end_to_end(block, (kind, layer)) for block in results.blocks())
            shape, dtype = (int(rows[-1]), job.width), stored(job.options.dtype)
            _add_blocks(archive, f"{group}embeddings", shape, dtype, blocks)


def _add(archive: ZipFile, name: str, values: np.ndarray) -> None:
    _add_blocks(archive, name, values.shape, values.dtype, iter([values]))


def _add_blocks(
    archive: ZipFile,
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype,
    blocks: Iterator[np.ndarray],
) -> None:
    """Writes an array block by block; the date is fixed, so that equal arrays make equal bytes."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    with archive.open(ZipInfo(f"{name}.npy"), "w", force_zip64=True) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            file.write(np.ascontiguousarray(block).tobytes())
