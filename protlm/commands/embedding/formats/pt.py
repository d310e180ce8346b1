"""A folder with a file NAME.pt for each protein, as esm-extract writes them.

A file has `label`, the header, and by layer `representations` (per residue), `mean_representations`
and `bos_representations`; other kinds are called alike. `torch.load(path, weights_only=True)` reads
it. `manifest.json` has what the HDF5 formats have as attributes, and the file of each protein.
"""

import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from protlm.checkpoints.format import save
from protlm.commands.embedding.job import Job
from protlm.commands.embedding.results import Embedded, Results
from protlm.commands.hdf5_output import entry_name
from protlm.options.embed import Dtype, Pooling
from protlm.system.json_file import write_json
from protlm.system.paths import complete_folder
from protlm.system.terminal import watched

SUFFIXES, WHAT = ("",), "a folder of .pt files"
# The longest file names have 255 bytes.
_LONGEST_NAME = 240
_NAMES = {Pooling.per_tok: "representations", Pooling.ranges: "range_representations"}


def write(results: Results, output: Path) -> None:
    """Writes the files and the manifest."""
    job, files = results.job, {}
    with complete_folder(output, check=results.check) as folder:
        for protein in watched("proteins written", results):
            name = file_name(protein.record.identifier)
            save(_contents(job, protein), folder / name)
            files[protein.record.identifier] = name
        write_json(folder / "manifest.json", {**results.attributes(), "files": files}, indent=1)


def file_name(identifier: str) -> str:
    """Returns the name of a protein's file, which cannot leave the folder.

    >>> file_name("sp|P1|A/B")
    'sp|P1|A%2FB.pt'
    """
    name = entry_name(identifier)
    if len(name.encode(errors="surrogateescape")) > _LONGEST_NAME:
        name = hashlib.sha256(identifier.encode(errors="surrogateescape")).hexdigest()
    return f"{name}.pt"


def _contents(job: Job, protein: Embedded) -> dict[str, object]:
    contents: dict[str, object] = {
        "label": protein.record.header,
        "original_id": protein.original_id,
        "length": len(protein.record.sequence),
    }
    for kind in job.options.include:
        name = _NAMES.get(kind, f"{kind.value}_representations")
        contents[name] = {
            layer: _tensor(protein.vectors[kind, layer], job.options.dtype)
            for layer in job.options.layers
        }
    if protein.ranges:
        contents["ranges"] = [list(one) for one in protein.ranges]
    return contents


def _tensor(values: np.ndarray, dtype: Dtype) -> Tensor:
    if dtype is Dtype.bfloat16:
        return torch.from_numpy(values.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(values.copy())
