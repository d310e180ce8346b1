"""HDF5 with a data set for each protein at the root, as UniProt's per-protein.h5.

With several kinds or layers, the entry of a protein is a group with the data sets KIND/LAYER. That
of sparse features is a group with `data`, `indices` and `indptr`, as in SciPy's `csr_array`.
"""

import hashlib
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from protlm.commands.embedding.job import Job
from protlm.commands.embedding.results import Embedded, Results
from protlm.commands.hdf5_output import ProteinFile, hdf5_file
from protlm.commands.outputs import HDF5
from protlm.options.embed import Key, Pooling
from protlm.system.terminal import watched

SUFFIXES, WHAT = HDF5


def write(results: Results, output: Path) -> None:
    """Writes the data sets in the order of the input; a hash is written once, and counted."""
    job, renamed, num_equal = results.job, dict(results.job.inputs.proteins.renamed), 0
    with hdf5_file(output, job.attributes, results.skipped, check=results.check) as (file, disk):
        entries = ProteinFile(file, disk, renamed)
        for protein in watched("writing", results):
            record = protein.record
            if job.options.key is Key.sequence_hash:
                # As biotrainer names its entries.
                text = f"{record.sequence}_{len(record.sequence)}"
                record = record._replace(identifier=hashlib.sha256(text.encode()).hexdigest())
                if record.identifier in renamed:
                    num_equal += 1
                    continue
                renamed[record.identifier] = protein.original_id
            _add(entries, replace(protein, record=record), job)
    if num_equal:
        print(f"records with the entry of an equal sequence: {num_equal:,}", file=sys.stderr)


def _add(file: ProteinFile, protein: Embedded, job: Job) -> None:
    windows, is_single = job.options.windows, job.options.is_single
    attributes: dict[str, object] = {"windows": protein.num_windows} if windows else {}
    if protein.ranges:
        attributes["ranges"] = np.array(protein.ranges)
    for (kind, layer), values in protein.vectors.items():
        path = "" if is_single else f"{kind.value}/{layer}"
        if kind is not Pooling.features or job.autoencoder is None:
            file.add(protein.record, path, attributes, data=values)
        else:
            sparse = job.autoencoder.features_of(torch.tensor(values))
            with_shape = {**attributes, "shape": sparse.shape}
            for name in ("data", "indices", "indptr"):
                place = f"{path}/{name}".lstrip("/")
                file.add(protein.record, place, with_shape, data=getattr(sparse, name))
