"""HDF5 with the vectors of all proteins end to end, for a million proteins and more.

`ids`, `original_ids` and `lengths` have a row for each protein, and `embeddings` its vectors. Kinds
with several vectors for a protein have `offsets`: those of protein n are the rows from `offsets[n]`
to `offsets[n + 1]`. With several kinds or layers, `embeddings` and `offsets` are in KIND/LAYER.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protlm.commands.embedding.formats import hdf5
from protlm.commands.embedding.job import Job, Key, stored
from protlm.commands.embedding.results import Results, end_to_end
from protlm.commands.hdf5_output import TEXT, DiskFile, hdf5_file, sanitize
from protlm.system.terminal import JobProgress

SUFFIXES, WHAT = hdf5.SUFFIXES, hdf5.WHAT


def group_of(job: Job, key: Key) -> str:
    """Returns the start of the names of a kind and layer."""
    return "" if job.options.is_single else f"{key[0].value}/{key[1]}/"


def write(results: Results, output: Path) -> None:
    """Writes the arrays in the order of the input."""
    job, number = results.job, len(results)
    with hdf5_file(output, job.attributes, results.skipped, check=results.check) as (file, disk):
        texts = [file.create_dataset(name, number, TEXT) for name in ("ids", "original_ids")]
        lengths = file.create_dataset("lengths", number, "int64")
        arrays = {}
        for kind, layer in job.keys:
            group, rows = group_of(job, (kind, layer)), results.offsets(kind)
            if kind.is_matrix:
                file.create_dataset(f"{group}offsets", data=rows)
            shape, name = (int(rows[-1]), job.width), f"{group}embeddings"
            arrays[kind, layer] = file.create_dataset(name, shape, stored(job.options.dtype))
        fill(results, [*texts, lengths], arrays, disk)


def fill(results: Results, columns: list[Any], arrays: Mapping[Key, Any], disk: DiskFile) -> None:
    """Writes the columns (identifiers, original ones, lengths) and the vectors, in blocks."""
    first, filled = 0, dict.fromkeys(arrays, 0)
    ids, original_ids, lengths = columns
    with JobProgress("proteins written", len(results)) as progress:
        for block in results.blocks():
            rows = slice(first, first + len(block))
            ids[rows] = [sanitize(protein.record.identifier) for protein in block]
            original_ids[rows] = [sanitize(protein.original_id) for protein in block]
            lengths[rows] = [len(protein.record.sequence) for protein in block]
            for key, array in arrays.items():
                values = end_to_end(block, key)
                array[filled[key] : filled[key] + len(values)] = values
                filled[key] += len(values)
            first = rows.stop
            disk.check()
            progress.update(first)
