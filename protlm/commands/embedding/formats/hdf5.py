"""HDF5 with a data set for each protein at the root, as UniProt's per-protein.h5.

With several kinds or layers, the entry of a protein is a group with the data sets KIND/LAYER.
"""

from pathlib import Path

import numpy as np

from protlm.commands.embedding.results import Embedded, Results
from protlm.commands.hdf5_output import ProteinFile, hdf5_file
from protlm.system.terminal import watched

SUFFIXES, WHAT = (".h5", ".hdf5"), "an HDF5 file"


def write(results: Results, output: Path) -> None:
    """Writes the data sets in the order of the input."""
    job = results.job
    with hdf5_file(output, job.attributes(), results.skipped, check=results.check) as (file, disk):
        entries = ProteinFile(file, disk, job.proteins.renamed)
        for protein in watched("writing", results):
            _add(entries, protein, is_single=job.options.is_single, windows=job.options.windows)


def _add(file: ProteinFile, protein: Embedded, *, is_single: bool, windows: bool) -> None:
    attributes: dict[str, object] = {"windows": protein.num_windows} if windows else {}
    if protein.ranges:
        attributes["ranges"] = np.array(protein.ranges)
    for (kind, layer), values in protein.vectors.items():
        path = "" if is_single else f"{kind.value}/{layer}"
        file.add(protein.record, path, attributes, data=values)
