"""Features of proteins or residues: hidden states of a model, and baselines without one."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from protlm.analysis.sequence_features import compositions, mean_embeddings, three_mers
from protlm.data.dataset import collate
from protlm.data.vocabulary import VOCABULARY
from protlm.model.pretrained import PretrainedModel
from protlm.system.paths import explain_os_error

# Residues on either side in the window of the baseline.
_FLANK = 8
_LETTERS = len(VOCABULARY.residues)


def embeddings(
    model: PretrainedModel,
    sequences: Sequence[str],
    *,
    layers: Sequence[int],
    tokens_per_batch: int,
    places: Sequence[np.ndarray] | None = None,
) -> list[np.ndarray]:
    """Returns hidden states by layer, float32.

    Args:
        model: the model.
        sequences: no longer than it accepts.
        layers: 0 the embedding, n the output of block n.
        tokens_per_batch: the largest number of rows times padded length.
        places: residues of each sequence whose states are returned; None returns means.

    Returns:
        [sequences, D] of means, or [residues, D]; of several layers, in temporary files.
    """
    tokens = [VOCABULARY.encode(one) for one in sequences]
    if places is None:
        return mean_embeddings(model, tokens, layers=layers, tokens_per_batch=tokens_per_batch)
    width = model.description.model.model_dim
    ends = np.cumsum([0, *map(len, places)])
    shape = (int(ends[-1]), width)
    found = [np.empty(shape, np.float32)] if len(layers) == 1 else [_on_disk(shape) for _ in layers]
    for rows, hidden in _batches(model, tokens, layers, tokens_per_batch):
        for number, row in enumerate(rows):
            for layer, states in zip(layers, found, strict=True):
                here = hidden[layer][number, 1:][torch.as_tensor(places[row])]
                states[ends[row] : ends[row + 1]] = here.float().cpu().numpy()
    return found


def _on_disk(shape: tuple[int, int]) -> np.ndarray:
    """Returns an array in a temporary file, float32 zeros."""
    try:
        with tempfile.TemporaryFile() as file:
            # Written, because a file with holes ends the process when the disk is full.
            for _ in range(shape[0]):
                file.write(bytes(4 * shape[1]))
            file.flush()
            return np.memmap(file, np.float32, "r+", shape=shape)
    except OSError as error:
        raise explain_os_error(error, Path(tempfile.gettempdir())) from error


@torch.inference_mode()
def _batches(
    model: PretrainedModel,
    tokens: Sequence[np.ndarray],
    layers: Sequence[int],
    tokens_per_batch: int,
) -> Iterator[tuple[list[int], dict[int, torch.Tensor]]]:
    """Yields row numbers and their hidden states, in batches of similar length."""
    order = sorted(range(len(tokens)), key=lambda row: -len(tokens[row]))
    start = 0
    while start < len(order):
        number = max(tokens_per_batch // (len(tokens[order[start]]) + 2), 1)
        rows = order[start : start + number]
        tokens_BL, mask_BL = collate([tokens[row] for row in rows])
        tokens_BL, mask_BL = tokens_BL.to(model.device), mask_BL.to(model.device)
        out = model.network(tokens_BL, mask_BL, causal=model.causal, layers=layers)
        yield rows, out.hidden
        start += number


def protein_baselines(sequences: Sequence[str], fit: Sequence[int]) -> dict[str, Any]:
    """Returns features of all proteins without a model, [sequences, width], by name.

    `composition` has the frequencies of the amino acids and the length, `three_mers` TF-IDF of
    the 3-mers that occur in the rows `fit`, and `length` the logarithm of the length.
    """
    tokens = [VOCABULARY.encode(one) for one in sequences]
    composition = compositions(tokens)
    _, known = three_mers([tokens[row] for row in fit], tokens)
    return {"composition": composition, "three_mers": known, "length": composition[:, -1:]}


def residue_baselines(
    sequences: Sequence[str], places: Sequence[np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns one-hot features of residues without a model, by name, float32 [residues, width].

    `residues_around` has the letters of the residue and of eight on either side, `residue` its own.
    """
    windows = []
    for sequence, where in zip(sequences, places, strict=True):
        numbers = VOCABULARY.encode(sequence).astype(np.int64) - int(VOCABULARY.residues[0])
        padded = np.pad(np.eye(_LETTERS, dtype=np.float32)[numbers], ((_FLANK, _FLANK), (0, 0)))
        shifted = [padded[where + shift] for shift in range(2 * _FLANK + 1)]
        windows.append(np.concatenate(shifted, axis=1))
    around = np.concatenate(windows)
    return {
        "residues_around": around,
        "residue": around[:, _FLANK * _LETTERS : (_FLANK + 1) * _LETTERS],
    }
