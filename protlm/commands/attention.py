"""`protlm attention FASTA -m MODEL -o OUT.h5`: exact attention maps, written in blocks of rows."""

from pathlib import Path

import numpy as np

from protlm.attention.layers import attention_label
from protlm.commands.hdf5_output import ProteinFile, entry_bytes, protein_file
from protlm.commands.outputs import HDF5, check_suffix
from protlm.data.records import Record
from protlm.data.records.proteins import Proteins
from protlm.loading import load_model
from protlm.model.memory import Room
from protlm.model.pretrained import PretrainedModel
from protlm.model.relatives import drawn_beside, in_contexts, models_of
from protlm.options.look import MapOptions
from protlm.plots import attention_grid, save_figure
from protlm.system.errors import UserError, interrupt_explained
from protlm.system.paths import all_or_none
from protlm.system.terminal import printable, watched

# The approximate number of map entries in memory, for proteins of any length.
_BLOCK_ENTRIES = 1 << 25
_LONGEST_FIGURE = 2_000


@interrupt_explained("nothing was written; the same command starts again")
def attention_maps(fasta: Path, model_path: Path, output: Path, options: MapOptions) -> None:
    """Writes a data set `layer_N`, heads × L × L, for every protein and layer.

    Rows are the positions that attend, columns those attended to. Position 0 is `<cls>`, residue n
    is at position n, and the last position is `<eos>`. In a model with another frame, the attribute
    `first_residue` is the position of the first residue, from 0.
    """
    check_suffix(output, *HDF5)
    model = load_model(model_path, device=options.device)
    layers, heads = model.layers_and_heads(options.layers, options.heads)
    proteins = Proteins(fasta, model.max_residues, options.duplicates, refuse=Room(model).refusal)
    _check_figure(proteins, options.figure)
    contexts = in_contexts(
        model, options.relatives, (one.identifier for one in proteins), only_first=True
    )
    pairs = sum((length + model.vocabulary.num_around) ** 2 for length in proteins.lengths)
    size = entry_bytes(len(proteins) * len(layers), len(layers) * len(heads) * pairs, options.dtype)
    queries = ((record.identifier, record.sequence) for record in proteins)
    with (
        drawn_beside(contexts, output, queries),
        all_or_none() as written,
        protein_file(
            output,
            model,
            num_bytes=size,
            skipped=proteins.without_entry(),
            renamed=proteins.renamed,
        ) as file,
    ):
        for record in watched("attention maps", proteins):
            model = models_of(model, contexts, (record.identifier, record.sequence))[0]
            _write(file, model, record, layers, heads, options.dtype)
        if options.figure is not None:
            # Of the one protein.
            _draw(model, next(iter(proteins)), layers, heads, options.figure)
            written.append(options.figure)
    proteins.report("mapped")
    print(*filter(None, (output, options.figure)), sep="\n")


def _check_figure(proteins: Proteins, figure: Path | None) -> None:
    if figure and (len(proteins) != 1 or proteins.lengths[0] > _LONGEST_FIGURE):
        raise UserError(
            f"--figure draws one protein of at most {_LONGEST_FIGURE:,} residues; "
            f"{proteins.name} has {len(proteins)} proteins, the longest of "
            f"{max(proteins.lengths, default=0):,}; omit --figure, or give a file with one protein"
        )


def _write(
    file: ProteinFile,
    model: PretrainedModel,
    record: Record,
    layers: tuple[int, ...],
    heads: tuple[int, ...],
    dtype: str,
) -> None:
    batch = model.tokenize([record.sequence])
    length = batch.tokens_BL.shape[1]
    shape = (len(heads), length, length)
    sequence = record.sequence if len(record.sequence) < 30_000 else ""
    maps = {}
    for layer in layers:
        own = {"layer": layer, "heads": np.array(heads), "sequence": sequence}
        if model.description.frame is not None:
            own["first_residue"] = model.vocabulary.start
        maps[layer] = file.add(record, f"layer_{layer}", own, shape=shape, dtype=dtype)
    block = max(1, min(256, _BLOCK_ENTRIES // (length * model.num_heads)))
    for layer, rows, map_BHML in model.attention_row_blocks(batch, layers, heads, block=block):
        file.write(maps[layer], map_BHML[0].float().cpu().numpy(), rows)


def _draw(
    model: PretrainedModel,
    record: Record,
    layers: tuple[int, ...],
    heads: tuple[int, ...],
    path: Path,
) -> None:
    maps = model.attention_maps(model.tokenize([record.sequence]), layers, heads)
    name = printable(record.identifier)
    figure = attention_grid(
        {layer: map_BHLL[0].float().numpy() for layer, map_BHLL in maps.items()},
        title=f"{name}: attention of {attention_label(model.description.attention_config)}",
        heads=heads,
    )
    save_figure(figure, path)
