"""Mean ablation: the output of one head is replaced by its mean over positions.

Unlike a zero, the mean keeps the scale of the input of the next layers (as in Michel et al. 2019,
arXiv 1905.10650, who set heads to zero; the mean is the usual correction).
"""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from protlm.analysis.bootstrap import ratio_interval
from protlm.analysis.fitted_contacts import FittedContacts
from protlm.analysis.masked_proteins import ProteinScores, masked_scores
from protlm.analysis.precision import mean_precision
from protlm.analysis.proteins import Protein, sequences_of
from protlm.analysis.replacement import with_attention
from protlm.attention import Attention
from protlm.model.pretrained import PretrainedModel
from protlm.system.terminal import JobProgress


@final
class AblatedHead(Attention):
    """A mechanism in which the output of one head is constant; its maps are unchanged.

    Args:
        mechanism: the mechanism.
        head: the head, from 1.
        mean_C: the constant.
    """

    supports_bidirectional = True
    supports_causal = True

    def __init__(self, mechanism: Attention, *, head: int, mean_C: Tensor) -> None:
        super().__init__()
        self.mechanism = mechanism
        self.head = head
        self.takes_rotary = mechanism.takes_rotary  # pyright: ignore[reportAttributeAccessIssue]
        self.register_buffer("mean_C", mean_C)

    def forward(
        self,
        q_BHLK: Tensor,
        k_BHLK: Tensor,
        v_BHLC: Tensor,
        *,
        hidden_BLD: Tensor,
        mask_BL: Tensor,
        causal: bool,
    ) -> Tensor:
        out_BHLC = self.mechanism(
            q_BHLK, k_BHLK, v_BHLC, hidden_BLD=hidden_BLD, mask_BL=mask_BL, causal=causal
        ).clone()
        mean_C = self.get_buffer("mean_C").to(out_BHLC.dtype)
        out_BHLC[:, self.head - 1] = mean_C * mask_BL[..., None]
        return out_BHLC

    def attention_map(
        self,
        q_BHLK: Tensor,
        k_BHLK: Tensor,
        *,
        hidden_BLD: Tensor,
        mask_BL: Tensor,
        causal: bool,
        rows: slice | None = None,
    ) -> Tensor:
        return self.mechanism.attention_map(
            q_BHLK, k_BHLK, hidden_BLD=hidden_BLD, mask_BL=mask_BL, causal=causal, rows=rows
        )


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


def without_head(
    model: PretrainedModel, layer: int, head: int, means_NHC: Tensor
) -> PretrainedModel:
    """Returns the model with the output of a head replaced by its mean, both from 1."""

    def ablated(number: int) -> Attention:
        mechanism = model.network.mechanism(number)
        return AblatedHead(mechanism, head=head, mean_C=means_NHC[number - 1, head - 1])

    return with_attention(model, ablated, [layer])


def ablate_heads(
    model: PretrainedModel, proteins: Sequence[Protein], fit: Sequence[Protein], *, seed: int
) -> dict[str, Any]:
    """Measures predictions without each head, one head at a time.

    Args:
        model: the model.
        proteins: the proteins to predict residues of, and contacts if they have structures.
        fit: proteins with structures for the contact regression, which is fitted to the intact
            model; empty without structures. An ablated head also leaves the regression.
        seed: seed of masks, solver and bootstrap.

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
    places = list(np.ndindex(model.num_layers, model.num_heads))
    with JobProgress("ablating heads", len(places)) as progress:
        for done, (layer, head) in enumerate(places, start=1):
            ablated = without_head(model, layer + 1, head + 1, means_NHC)
            after = masked_scores(ablated, sequences, seed=seed)
            entry = {"layer": layer + 1, "head": head + 1, **_changes(before, after, seed)}
            if contacts and found is not None:
                left = contacts.of(ablated, layer * model.num_heads + head)
                entry["P@L"] = mean_precision(left - found, seed=seed)
            changes.append(entry)
            progress.update(done)
    return {"intact": intact, "changes": changes}


def _changes(before: ProteinScores, after: ProteinScores, seed: int) -> dict[str, Any]:
    return {
        "accuracy": ratio_interval(after.correct - before.correct, before.targets, seed=seed),
        "nats": ratio_interval(after.nats - before.nats, before.targets, seed=seed),
    }
