"""A trained model with other mechanisms in its layers, or without a head; and what that costs.

All weights are unchanged. The costs are those of predicted residues and of predicted contacts of
some proteins. Ablation replaces the output of a head by its mean over positions, which keeps the
scale of the input of the next layers, unlike a zero (Michel et al. 2019, arXiv 1905.10650).
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protlm.analysis.bootstrap import ratio_interval
from protlm.analysis.contact_regression import ContactRegression, check_disjoint, head_features
from protlm.analysis.precision import mean_precision, precision_at
from protlm.analysis.structures import Protein
from protlm.attention import Attention, create
from protlm.data.masking import row_rng
from protlm.model.block import Block
from protlm.model.pretrained import PretrainedModel
from protlm.system.terminal import watched

Mechanism = Callable[[int], Attention]


def with_attention(
    model: PretrainedModel, mechanism: Mechanism, layers: Iterable[int]
) -> PretrainedModel:
    """Returns a model with another mechanism in the blocks `layers`, numbered from 1.

    The weights are those of `model`, in the same memory, so that they must not be changed.
    """
    tensors = [*model.network.parameters(), *model.network.buffers()]
    network = copy.deepcopy(model.network, {id(tensor): tensor for tensor in tensors})
    for number in layers:
        block = network.blocks[number - 1]
        assert isinstance(block, Block)
        block.attention.mechanism = mechanism(number).to(model.device)
        if network.relative is not None:
            network.relative.add_to(block.attention.mechanism)
    return PretrainedModel(
        network, model.description, rebuild=lambda seed: model.with_random_weights(seed).network
    )


def favor(
    model: PretrainedModel,
    num_features: int,
    *,
    draw: int,
    optimal_for: Mapping[int, float] | None = None,
) -> Mechanism:
    """Returns a function that builds `performer_softmax` for a block of a model.

    `optimal_for` has E|q̂ + k̂|² by block, for optimal positive features.
    """
    sizes = model.description.model

    def mechanism(layer: int) -> Attention:
        optimal = None if optimal_for is None else optimal_for[layer]
        return create(
            "performer_softmax",
            {"num_features": num_features, "optimal_for": optimal},
            num_heads=sizes.num_heads,
            head_dim=sizes.width_of_head,
            model_dim=sizes.model_dim,
            max_length=sizes.max_length,
            seed=draw * model.num_layers + layer,
        )

    return mechanism


class ProteinScores(NamedTuple):
    """The nats, correct predictions and targets of each protein, float64."""

    nats: np.ndarray
    correct: np.ndarray
    targets: np.ndarray


@torch.inference_mode()
def masked_scores(
    model: PretrainedModel, sequences: Sequence[str], *, mask_fraction: float = 0.15, seed: int = 0
) -> ProteinScores:
    """Scores the predictions of residues, with the same masks for all models compared.

    A masked model predicts `mask_fraction` of the residues of each protein, at least one, replaced
    by `<mask>`; the places depend on the seed and on the number of the protein. A causal model
    predicts every residue from those before it.
    """
    rows = []
    for number, sequence in enumerate(sequences):
        batch = model.tokenize([sequence])
        words = model.vocabulary
        residues = batch.tokens_BL[0, words.inner]
        tokens_BL = batch.tokens_BL.clone()
        places = np.arange(len(residues))
        if not model.causal:
            chosen = row_rng(seed, 0, number).permutation(len(residues))
            places = np.sort(chosen[: max(1, round(mask_fraction * len(residues)))])
            tokens_BL[0, words.start + places] = words.mask
        logits_BLV = model.network(tokens_BL, batch.mask_BL, causal=model.causal).logits_BLV
        asked = words.before if model.causal else words.inner
        predicted = logits_BLV[0, asked][places].double()
        targets = residues[places]
        nats = F.cross_entropy(predicted, targets, reduction="sum")
        correct = (predicted.argmax(-1) == targets).sum()
        rows.append((float(nats), float(correct), float(len(places))))
    return ProteinScores(*np.array(rows).T)


@final
class FittedContacts:
    """P@L of proteins over pairs 6 or more apart, by a regression that is fitted to others."""

    def __init__(
        self,
        model: PretrainedModel,
        fit: Sequence[Protein],
        proteins: Sequence[Protein],
        *,
        seed: int,
    ) -> None:
        check_disjoint(fit, proteins)
        self._proteins = proteins
        self._regression = ContactRegression(seed=seed).fit(
            (head_features(model, protein.sequence), protein.contacts()) for protein in fit
        )

    def of(self, model: PretrainedModel, ablated: int | None = None) -> np.ndarray:
        """Returns P@L of each protein by a model, without one of its heads; NaN without a pair."""
        found = []
        for protein in self._proteins:
            features_HLL = head_features(model, protein.sequence)
            if ablated is not None:
                features_HLL[ablated] = 0.0
            predicted_LL = self._regression.predict(features_HLL)
            found.append(precision_at(predicted_LL, protein.contacts()))
        return np.array(found)


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


TOP_KEYS = 10
# Estimated weights below this count as this in a divergence, which is infinite otherwise.
_SMALLEST = 1e-30


def compare_estimates(
    exact_HLM: Tensor, estimates: Sequence[Tensor], v_HMC: Tensor
) -> dict[str, Tensor]:
    """Compares several draws of an estimated map with the exact map, per head, float64 H.

    With a row a of the exact map, â of an estimate, values V, and O = A V:

    * `kl`: KL(a ‖ â) in nats, `total_variation`: Σ |a - â| / 2, each the median over rows and
      draws; `total_variation_95`: its 95th percentile;
    * `top_overlap`: the fraction of the 10 largest weights of a row that are among the 10 largest
      of its estimate, mean over rows and draws;
    * `output_error`: ‖Ô - O‖ / ‖O‖, root mean square over draws;
    * `bias`, `deviation`: the error of the mean output and the deviation of the draws from it,
      output_error² = bias² + deviation². Their squares are unbiased for any number of draws, at
      least two; a negative bias² becomes 0.
    """
    number, a_HLM = len(estimates), exact_HLM.double()
    assert number >= 2, "one draw has no variance"
    outputs = torch.stack([x.double() @ v_HMC.double() for x in estimates])
    exact_HLC = a_HLM @ v_HMC.double()
    square_H = exact_HLC.square().sum(dim=(1, 2))
    mean_HLC = outputs.mean(dim=0)
    variance_H = (outputs - mean_HLC).square().sum(dim=(0, 2, 3)) / (number - 1) / square_H
    bias_H = (mean_HLC - exact_HLC).square().sum(dim=(1, 2)) / square_H - variance_H / number
    error_H = (outputs - exact_HLC).square().sum(dim=(0, 2, 3)) / number / square_H
    divergences = [_divergences(a_HLM, x.double()) for x in estimates]
    kl_HL, variation_HL, overlap_HL = (
        torch.cat(parts, dim=1) for parts in zip(*divergences, strict=True)
    )
    return {
        "kl": kl_HL.quantile(0.5, dim=1),
        "total_variation": variation_HL.quantile(0.5, dim=1),
        "total_variation_95": variation_HL.quantile(0.95, dim=1),
        "top_overlap": overlap_HL.mean(dim=1),
        "output_error": error_H.sqrt(),
        "bias": bias_H.clamp(min=0).sqrt(),
        "deviation": variance_H.sqrt(),
    }


def _divergences(a_HLM: Tensor, estimate_HLM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    positive_HLM = estimate_HLM.clamp(min=_SMALLEST)
    kl_HL = (torch.special.xlogy(a_HLM, a_HLM) - a_HLM * positive_HLM.log()).sum(dim=2)
    variation_HL = 0.5 * (a_HLM - estimate_HLM).abs().sum(dim=2)
    top = min(TOP_KEYS, a_HLM.shape[2])
    chosen = [
        torch.zeros_like(x, dtype=torch.bool).scatter(2, x.topk(top, dim=2).indices, True)
        for x in (a_HLM, estimate_HLM)
    ]
    overlap_HL = (chosen[0] & chosen[1]).sum(dim=2) / top
    return kl_HL, variation_HL, overlap_HL.double()
