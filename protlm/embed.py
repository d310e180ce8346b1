"""`protlm embed FASTA -m MODEL -o OUT.h5`: one vector, or one per residue, for every protein."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from pathlib import Path

import numpy as np
from torch import Tensor

from protlm.build import load_model
from protlm.data.records import Record
from protlm.errors import UserError
from protlm.model.pretrained import PretrainedModel
from protlm.paths import check_output
from protlm.progress import JobProgress
from protlm.protein_file import ProteinFile, entry_bytes, protein_file
from protlm.proteins import Duplicates, Proteins

# Records are sorted by length inside a window of this many, so that memory stays bounded.
_WINDOW = 2_048


class Include(StrEnum):
    """What is kept of a protein: the mean over its residues, each residue, or `<cls>`."""

    mean = "mean"
    per_tok = "per_tok"
    bos = "bos"


@dataclass(frozen=True)
class EmbedOptions:
    """The settings of `protlm embed`.

    With one kind and one layer a protein's entry is the data set itself, (D,) or (L, D); with
    more it is a group, KIND/LAYER.
    """

    include: tuple[Include, ...] = (Include.mean,)
    layers: tuple[int, ...] = (-1,)
    tokens_per_batch: int = 4_096
    dtype: str = "float32"
    device: str = "auto"
    duplicates: Duplicates = Duplicates.error


def embed(fasta: Path, model_path: Path, output: Path, options: EmbedOptions) -> None:
    """Embeds every record of a sequence file; those too long for the model are reported.

    Raises:
        UserError: an option or a layer that does not exist.
        InputDataError: the file or the model is damaged, or an identifier is repeated.
        OutputError: the output exists or cannot be written.
    """
    if options.tokens_per_batch < 1:
        raise UserError(f"--toks-per-batch {options.tokens_per_batch} must be at least 1")
    check_output(output)
    model = load_model(model_path, device=options.device)
    options = replace(
        options,
        include=tuple(dict.fromkeys(options.include)),
        layers=tuple(dict.fromkeys(model.layer_number(n, first=0) for n in options.layers)),
    )
    longest = None if model.max_length is None else model.max_length - 2
    proteins = Proteins(fasta, max_residues=longest, duplicates=options.duplicates)
    num_values = sum(_values(length, model, options) for length in proteins.lengths)
    size = entry_bytes(len(proteins), num_values, options.dtype)
    with (
        protein_file(output, model, num_bytes=size) as file,
        JobProgress("embedding", len(proteins)) as progress,
    ):
        done = 0
        for records in batches(iter(proteins), options.tokens_per_batch):
            _write(file, model, records, options)
            done += len(records)
            progress.update(done)
    proteins.report("embedded")


def batches(records: Iterator[Record], tokens_per_batch: int) -> Iterator[list[Record]]:
    """Batches of similar length whose padded size stays in the budget; a longer record is alone."""
    while window := list(islice(records, _WINDOW)):
        window.sort(key=lambda record: len(record.sequence))
        batch: list[Record] = []
        for record in window:
            # Sorted by length: the newest record is the longest of the batch.
            if batch and (len(batch) + 1) * (len(record.sequence) + 2) > tokens_per_batch:
                yield batch
                batch = []
            batch.append(record)
        yield batch


def _values(length: int, model: PretrainedModel, options: EmbedOptions) -> int:
    rows = sum(length if kind is Include.per_tok else 1 for kind in options.include)
    return rows * len(options.layers) * int(model.description["model"]["model_dim"])


def _write(
    file: ProteinFile, model: PretrainedModel, records: list[Record], options: EmbedOptions
) -> None:
    batch = model.tokenize([record.sequence for record in records])
    hidden = model(batch, options.layers).hidden
    single = len(options.include) == len(options.layers) == 1
    for row, record in enumerate(records):
        for kind in options.include:
            for layer in options.layers:
                vectors = pool(hidden[layer][row], len(record.sequence), kind)
                dataset = file.add(
                    record,
                    "" if single else f"{kind.value}/{layer}",
                    shape=vectors.shape,
                    dtype=options.dtype,
                    attributes={"include": kind.value, "layer": layer},
                )
                dataset[...] = vectors


def pool(hidden_LD: Tensor, num_residues: int, kind: Include) -> np.ndarray:
    """The vectors of one protein: (D,) for its mean or `<cls>`, (L, D) for its residues."""
    if kind is Include.bos:
        return hidden_LD[0].float().cpu().numpy()
    residues_LD = hidden_LD[1 : num_residues + 1].float()
    return (residues_LD.mean(0) if kind is Include.mean else residues_LD).cpu().numpy()
