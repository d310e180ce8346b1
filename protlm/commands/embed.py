"""`protlm embed FASTA -m MODEL -o OUT.h5`: one vector, or one per residue, for every protein."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from pathlib import Path

import numpy as np
from torch import Tensor

from protlm.build import load_model
from protlm.commands.inputs import Duplicates, Proteins
from protlm.commands.outputs import ProteinFile, check_hdf5_output, entry_bytes, protein_file
from protlm.data.records import Record
from protlm.errors import UserError
from protlm.model.pretrained import PretrainedModel
from protlm.terminal import JobProgress

# The number of records that are sorted by length at a time, which bounds the memory.
_WINDOW = 2_048


class Include(StrEnum):
    """The vectors of a protein: the mean over its residues, each residue, or `<cls>`."""

    mean = "mean"
    per_tok = "per_tok"
    bos = "bos"


@dataclass(frozen=True)
class EmbedOptions:
    """The settings of `protlm embed`.

    With one kind and one layer, the entry of a protein is a data set, (D,) or (L, D); otherwise it
    is a group with the data sets KIND/LAYER.
    """

    include: tuple[Include, ...] = (Include.mean,)
    layers: tuple[int, ...] = (-1,)
    tokens_per_batch: int = 4_096
    dtype: str = "float32"
    device: str = "auto"
    duplicates: Duplicates = Duplicates.error


def embed(fasta: Path, model_path: Path, output: Path, options: EmbedOptions) -> None:
    """Embeds every record of a sequence file; records that are too long are reported.

    Raises:
        UserError: an option or a layer that does not exist.
        InputDataError: the file or the model is damaged, or an identifier is repeated.
        OutputError: the output exists or cannot be written.
    """
    if options.tokens_per_batch < 1:
        raise UserError(f"--toks-per-batch {options.tokens_per_batch} must be at least 1")
    check_hdf5_output(output)
    model = load_model(model_path, device=options.device)
    options = replace(
        options,
        include=tuple(dict.fromkeys(options.include)),
        layers=tuple(dict.fromkeys(model.layer_number(n, first=0) for n in options.layers)),
    )
    longest = model.max_residues
    proteins = Proteins(fasta, max_residues=longest, duplicates=options.duplicates)
    num_values = sum(_values(length, model, options) for length in proteins.lengths)
    size = entry_bytes(len(proteins), num_values, options.dtype)
    with (
        protein_file(
            output,
            model,
            num_bytes=size,
            skipped=proteins.without_entry(),
            renamed=proteins.renamed,
        ) as file,
        JobProgress("embedding", len(proteins)) as progress,
    ):
        done, records = 0, iter(proteins)
        while window := list(islice(records, _WINDOW)):
            # Entries are in the order of the input; batches are sorted by length.
            for record in window:
                _add(file, model, record, options)
            for batch in batches(iter(window), options.tokens_per_batch):
                _write(file, model, batch, options)
                done += len(batch)
                progress.update(done)
    proteins.report("embedded")


def batches(records: Iterator[Record], tokens_per_batch: int) -> Iterator[list[Record]]:
    """Yields batches of similar length within the budget; a longer record is a batch by itself."""
    while window := list(islice(records, _WINDOW)):
        window.sort(key=lambda record: len(record.sequence))
        batch: list[Record] = []
        for record in window:
            # In this order, the newest record is the longest of the batch.
            if batch and (len(batch) + 1) * (len(record.sequence) + 2) > tokens_per_batch:
                yield batch
                batch = []
            batch.append(record)
        yield batch


def _values(length: int, model: PretrainedModel, options: EmbedOptions) -> int:
    rows = sum(length if kind is Include.per_tok else 1 for kind in options.include)
    return rows * len(options.layers) * model.description.model.model_dim


def _path(kind: Include, layer: int, options: EmbedOptions) -> str:
    is_single = len(options.include) == len(options.layers) == 1
    return "" if is_single else f"{kind.value}/{layer}"


def _add(file: ProteinFile, model: PretrainedModel, record: Record, options: EmbedOptions) -> None:
    width = model.description.model.model_dim
    for kind in options.include:
        for layer in options.layers:
            file.add(
                record,
                _path(kind, layer, options),
                shape=(len(record.sequence), width) if kind is Include.per_tok else (width,),
                dtype=options.dtype,
                attributes={"include": kind.value, "layer": layer},
            )


def _write(
    file: ProteinFile, model: PretrainedModel, records: list[Record], options: EmbedOptions
) -> None:
    batch = model.tokenize([record.sequence for record in records])
    hidden = model(batch, options.layers).hidden
    for row, record in enumerate(records):
        for kind in options.include:
            for layer in options.layers:
                vectors = pool(hidden[layer][row], len(record.sequence), kind)
                file.write(record, _path(kind, layer, options), vectors)


def pool(hidden_LD: Tensor, num_residues: int, kind: Include) -> np.ndarray:
    """Returns the vectors of one protein: (D,) for its mean or `<cls>`, (L, D) for its residues."""
    if kind is Include.bos:
        return hidden_LD[0].float().cpu().numpy()
    residues_LD = hidden_LD[1 : num_residues + 1].float()
    return (residues_LD.mean(0) if kind is Include.mean else residues_LD).cpu().numpy()
