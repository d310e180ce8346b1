"""The relatives of a page: which of them, and which of their residues, a protein attends to."""

import base64
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from protlm.data.families import Draw
from protlm.model.pretrained import PretrainedModel
from protlm.report.heads import Codes

# Relatives of a head, and residues of relatives for each residue of the protein.
_RELATIVES, _RESIDUES = 8, 5
# Weights that are in memory at a time.
_WEIGHTS = 1 << 23


@torch.inference_mode()
def relatives_to_plain(
    model: PretrainedModel, draw: Draw, sequence: str, layers: Sequence[int], heads: Sequence[int]
) -> dict[str, Any]:
    """Returns values for JSON of a model in a context: the relatives, and the heads that see them.

    Heads of relatives are one, without a number, with the mean of their weights. Of each head,
    `relatives` are those with the most weight, their special tokens included, and
    `mean` that of a row; `mass` is that of each row on these and on all relatives. `residues` are
    the strongest ones of each row, numbered through all relatives, and `weights` theirs.
    """
    words, batch, found = model.vocabulary, model.tokenize([sequence]), list[dict[str, Any]]()
    sizes = [len(one.residues) + words.num_around for one in draw.relatives]
    inner = (np.arange(size)[words.inner] for size in sizes)
    columns = np.concatenate([np.zeros(0, int), *map(np.add, accumulate(sizes, initial=0), inner)])
    rows, chosen = range(batch.tokens_BL.shape[1])[words.inner], [head - 1 for head in heads]
    for layer, inputs in model.attention_inputs(batch):
        are_apart, x = inputs.relatives is not None, inputs.relatives or inputs
        # A layer of the protein, or an empty context.
        if layer not in layers or not x.own:
            continue
        parts = []
        step = max(_WEIGHTS // (x.k_BHLK.shape[2] * model.num_heads), 1)
        for start in range(rows.start, rows.stop, step):
            block = slice(start, min(start + step, rows.stop))
            map_HML = x.map_rows(block)[0, ..., : x.own].float().cpu()
            map_HML = map_HML.mean(0, keepdim=True) if are_apart else map_HML[chosen]
            mass_HMR = torch.stack([one.sum(-1) for one in map_HML.split(sizes, -1)], -1)
            top = map_HML[..., columns].topk(min(_RESIDUES, len(columns)))
            parts.append((mass_HMR, *top))
        joined = (torch.cat(some, dim=1).numpy() for some in zip(*parts, strict=True))
        numbers = [None] if are_apart else heads
        for head, mass_LR, weights, residues in zip(numbers, *joined, strict=True):
            mean_R = mass_LR.mean(axis=0)
            order = np.argsort(-mean_R, kind="stable")[:_RELATIVES]
            mass = np.concatenate([mass_LR[:, order], mass_LR.sum(1, keepdims=True)], axis=1)
            found.append(
                {
                    "layer": layer,
                    "head": head,
                    "relatives": order.tolist(),
                    "mean": mean_R[order].tolist(),
                    "mass": Codes.of(mass).to_plain(),
                    "residues": base64.b64encode(residues.astype("<u4").tobytes()).decode("ascii"),
                    "weights": Codes.of(weights).to_plain(),
                }
            )
    return {
        "tokens": draw.num_tokens,
        "heads": found,
        "relatives": [
            {
                "name": one.name,
                "identity": one.identity,
                "residues": one.residues,
                "columns": None if one.columns is None else one.columns.tolist(),
            }
            for one in draw.relatives
        ],
    }
