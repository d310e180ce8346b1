"""The effect of each attention head on the predictions of residues and of contacts.

Ablation replaces the output of a head by its mean over positions, which keeps the scale of the
input of the next layers, unlike a zero (Michel et al. 2019, arXiv 1905.10650).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from protlm.analysis.bootstrap import ratio_interval
from protlm.analysis.precision import mean_precision
from protlm.analysis.replacement import masked_scores
from protlm.analysis.structures import Protein, ProteinChoice
from protlm.evaluation.base import NO_SPLIT, Evaluation, EvaluationData, ResultTable
from protlm.model.pretrained import PretrainedModel
from protlm.system.terminal import watched
from studies.replaced_attention import FittedContacts


@final
class Ablation(Evaluation):
    """Predictions without each head, one head at a time: a pass over the proteins for each."""

    needs_data = False

    def __init__(
        self,
        *,
        structures: str = "sample",
        fit_structures: str = "sample",
        sequences: str | None = None,
        max_proteins: int = 100,
        max_residues: int = 400,
        seed: int = 0,
    ) -> None:
        self.test = ProteinChoice(structures, max_proteins, max_residues, sequences)
        self.fit = ProteinChoice(fit_structures, max_proteins, max_residues, shipped="fit")
        self.seed = seed

    def run(self, model: PretrainedModel, data: EvaluationData | None) -> dict[str, Any]:
        """Returns the figures of the intact model, and the `changes` by head."""
        proteins = self.test.read(model)
        fit = self.fit.read(model) if self.test.sequences is None else []
        return ablate_heads(model, proteins, fit, seed=self.seed)

    def table(self, results: Mapping[str, dict[str, Any]]) -> ResultTable:
        values = results[NO_SPLIT]
        order = sorted(values["changes"], key=lambda x: -x["nats"]["mean"])
        columns = ("nats", *values["intact"])
        rows = []
        for change in order:
            found = [change[name] for name in columns]
            cells = [f"{x['mean']:+.4f} ({x['low']:+.4f} to {x['high']:+.4f})" for x in found]
            rows.append((f"{change['layer']}-{change['head']}", *cells))
        headings = ("layer-head", *(f"change of {name}" for name in columns))
        caption = "without each head; nats a residue; most costly heads first"
        return ResultTable(headings, rows, caption)


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
            out_BHLC = model.network.mechanism(layer)(x.q_BHLK, x.k_BHLK, x.v_BHLC, **x.rest)
            sums.append(out_BHLC[0].double().sum(dim=1))
        count += batch.tokens_BL.shape[1]
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
    `proteins` have no structures. An ablated head also leaves the regression. `changes` are of
    accuracy, nats a residue and P@L (pairs 6 or more apart), with paired intervals.
    """
    sequences = [protein.sequence for protein in proteins]
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
