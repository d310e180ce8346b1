"""Mean ablation: the output of one head is replaced by its mean over positions.

Unlike a zero, the mean keeps the scale of the input of the next layers (as in Michel et al. 2019,
arXiv 1905.10650, who set heads to zero; the mean is the usual correction).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from protlm.analysis.bootstrap import ratio_interval
from protlm.analysis.precision import mean_precision
from protlm.analysis.proteins import Protein, sequences_of
from protlm.analysis.replacement import FittedContacts, masked_scores
from protlm.model.pretrained import PretrainedModel
from protlm.system.terminal import watched


@torch.inference_mode()
def mean_outputs(model: PretrainedModel, sequences: Sequence[str]) -> Tensor:
    """Returns the mean output of each head over all positions of some proteins, NHC."""
    totals, count = None, 0
    for sequence in sequences:
        batch = model.tokenize([sequence])
        sums = []
        for layer, x in model.network.attention_inputs(
            batch.tokens_BL, batch.mask_BL, causal=model.causal
        ):
            out_BHLC = model.network.mechanism(layer)(
                x.q_BHLK,
                x.k_BHLK,
                x.v_BHLC,
                hidden_BLD=x.hidden_BLD,
                mask_BL=batch.mask_BL,
                causal=model.causal,
            )
            sums.append(out_BHLC[0].double().sum(dim=1))
        count += len(sequence) + 2
        sums_NHC = torch.stack(sums)
        totals = sums_NHC if totals is None else totals + sums_NHC
    assert totals is not None, "no proteins"
    return totals / count


@contextmanager
def without_head(
    model: PretrainedModel, layer: int, head: int, means_NHC: Tensor
) -> Iterator[PretrainedModel]:
    """Replaces the output of a head by its mean, both from 1; its maps are unchanged."""
    mean_C = means_NHC[layer - 1, head - 1]

    def ablated(
        _: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any], out_BHLC: Tensor
    ) -> Tensor:
        out_BHLC = out_BHLC.clone()
        out_BHLC[:, head - 1] = mean_C.to(out_BHLC.dtype) * named["mask_BL"][..., None]
        return out_BHLC

    hook = model.network.mechanism(layer).register_forward_hook(ablated, with_kwargs=True)
    try:
        yield model
    finally:
        hook.remove()


def ablate_heads(
    model: PretrainedModel, proteins: Sequence[Protein], fit: Sequence[Protein], *, seed: int
) -> dict[str, Any]:
    """Measures predictions without each head, one head at a time.

    The contact regression is fitted to the intact model on the proteins `fit`, which are empty if
    `proteins` have no structures. An ablated head also leaves the regression.

    Returns:
        `intact` with accuracy and P@L of the model, and `changes`: for each head the change of
        accuracy, of nats a residue and of P@L (pairs 6 or more apart), with paired intervals.
    """
    sequences = sequences_of(proteins)
    means_NHC = mean_outputs(model, sequences)
    before = masked_scores(model, sequences, seed=seed)
    contacts = FittedContacts(model, fit, proteins, seed=seed) if fit else None
    found = contacts.of(model) if contacts else None
    intact = {"accuracy": ratio_interval(before.correct, before.targets, seed=seed)}
    if found is not None:
        intact["P@L"] = mean_precision(found, seed=seed)
    changes: list[dict[str, Any]] = []
    for layer, head in watched("ablating heads", [*np.ndindex(model.num_layers, model.num_heads)]):
        entry: dict[str, Any] = {"layer": layer + 1, "head": head + 1}
        with without_head(model, layer + 1, head + 1, means_NHC):
            after = masked_scores(model, sequences, seed=seed)
            for name, change in (
                ("accuracy", after.correct - before.correct),
                ("nats", after.nats - before.nats),
            ):
                entry[name] = ratio_interval(change, before.targets, seed=seed)
            if contacts and found is not None:
                left = contacts.of(model, layer * model.num_heads + head)
                entry["P@L"] = mean_precision(left - found, seed=seed)
        changes.append(entry)
    return {"intact": intact, "changes": changes}
