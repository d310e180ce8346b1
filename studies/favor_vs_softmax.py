"""FAVOR+ beside exact softmax attention, with the queries, keys and values of a trained model.

Per layer and head: divergence of rows, error of outputs, overlap of the largest weights, by the
number of random features and over several draws; and the perplexity and the contacts with the
attention of one layer, or of all layers, replaced (arXiv 2009.14794, section 4.2).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from protlm.analysis.precision import left_out, mean_precision
from protlm.analysis.replacement import masked_scores
from protlm.analysis.structures import ProteinChoice
from protlm.attention import Attention
from protlm.attention.linearized.variance import SquareNorms, pair_sums
from protlm.attention.softmax import Softmax
from protlm.evaluation.base import NO_SPLIT, Evaluation, EvaluationData, ResultTable, compared
from protlm.model.pretrained import PretrainedModel
from protlm.model.selfattention import AttentionInputs
from protlm.system.errors import UserError
from protlm.system.terminal import watched
from studies.replaced_attention import FittedContacts, compare_estimates, favor, with_attention

NORM = "square_norm"
_MEASURES = ("kl", "total_variation", "output_error", "bias", "deviation", "top_overlap")


@final
class FavorVsSoftmax(Evaluation):
    """Errors of FAVOR+ by layer, head and number of features, and what they cost.

    The reference is the exact softmax of the model's own queries and keys. Models of other
    mechanisms than softmax and FAVOR+ were not trained with it; for them compare perplexities.
    Contacts are predicted by the regression that is fitted to the model's own attention to the
    shipped structures. Perplexities and contacts are of the first draw of the projections.
    Controls are queries and keys rounded to bfloat16, and a model with random weights.
    """

    needs_data = False

    def __init__(
        self,
        *,
        structures: str = "sample",
        sequences: str | None = None,
        max_proteins: int = 10,
        max_residues: int = 400,
        features: Sequence[int] = (64, 256, 1024),
        draws: int = 5,
        seed: int = 0,
    ) -> None:
        if draws < 2:
            raise UserError(f"draws={draws} has no variance; give 2 or more")
        if not features or min(features) < 1:
            raise UserError(f"features={list(features)} must be numbers of 1 or more")
        self.proteins = ProteinChoice(structures, max_proteins, max_residues, sequences)
        self.fit = ProteinChoice("sample", 1000, max_residues, shipped="fit")
        self.features, self.draws, self.seed = tuple(features), draws, seed

    def run(self, model: PretrainedModel, data: EvaluationData | None) -> dict[str, Any]:
        """Returns `errors` by estimate, measure, layer and head, and costs by replacement.

        The costs are `perplexity` and, of structures, `contacts`: P@L of pairs 6 or more apart.
        """
        proteins = self.proteins.read(model)
        sequences = [protein.sequence for protein in proteins]

        def perplexity(one: PretrainedModel) -> float:
            scored = masked_scores(one, sequences, seed=self.seed)
            return math.exp(scored.nats.sum() / scored.targets.sum())

        models = compared(model, self.seed).items()
        found = {who: self._errors(one, sequences, who) for who, one in models}
        result = {
            "attention": model.description.attention,
            "num_proteins": len(sequences),
            "draws": self.draws,
            "errors": found["model"],
            "random_weights": found["random_weights"],
            "perplexity": self._costs(model, perplexity, "perplexities"),
            "replacement_draws": 1,
        }
        if self.proteins.sequences is None:
            fitted = FittedContacts(model, self.fit.read(model), proteins, seed=self.seed)

            def precision(one: PretrainedModel) -> float | None:
                found = mean_precision(fitted.of(one))
                result["num_with_pairs"] = found["count"]
                return found["mean"]

            result["contacts"] = self._costs(model, precision, "contacts")
        return result

    def table(self, results: Mapping[str, dict[str, Any]]) -> ResultTable:
        values, rows = results[NO_SPLIT], []
        own, exact = ("own attention", values["attention"]), ("all", "softmax")
        for name, place in (("own", own), ("softmax", exact)):
            rows.append((*place, *([""] * 7), *_cost_cells(values, name, None)))
        for who, errors in (("", values["errors"]), ("random weights, ", values["random_weights"])):
            for estimate, found in errors["by_estimate"].items():
                norms = np.array(errors[NORM])
                arrays = [np.array(found[name]) for name in _MEASURES]
                places: list[tuple[str, Any]] = [("all", slice(None))]
                if not who:
                    places = [*((str(n + 1), n) for n in range(len(norms))), *places]
                for place, where in places:
                    cells = [f"{x[where].mean():.3f}" for x in arrays]
                    costs = ("", "") if who else _cost_cells(values, estimate, place)
                    norm = f"{norms[where].mean():.1f}"
                    rows.append((f"{who}{place}", estimate, norm, *cells, *costs))
        columns = ("layer", "attention", "E|q̂+k̂|²", "KL", "total variation", "output error")
        columns += ("bias", "deviation", "top 10", "perplexity", "P@L")
        caption = (
            f"{values['num_proteins']} proteins, {values['draws']} draws, means over heads; "
            "perplexity and P@L (pairs 6 or more apart) with the attention of the layer replaced, "
            "of one draw"
        )
        counted = values.get("num_with_pairs", values["num_proteins"])
        lines = [caption, *left_out(values["num_proteins"], counted, "6 or more apart")]
        return ResultTable(columns, rows, "\n".join(lines))

    def _errors(self, model: PretrainedModel, sequences: Sequence[str], who: str) -> dict[str, Any]:
        """Returns means over proteins: square norms, and each measure by estimate, [N, H]."""
        norms: list[np.ndarray] = []
        found: dict[str, dict[str, list[np.ndarray]]] = {}
        for sequence in watched(f"estimates of softmax, {who}", sequences):
            layers = list(self._of_protein(model, sequence))
            norms.append(torch.stack([norm_H for norm_H, _ in layers]).numpy())
            for estimate in layers[0][1]:
                measures = found.setdefault(estimate, {})
                for name in layers[0][1][estimate]:
                    stacked = torch.stack([of[estimate][name] for _, of in layers])
                    measures.setdefault(name, []).append(stacked.numpy())
        by_estimate = {
            estimate: {name: np.mean(x, axis=0).tolist() for name, x in measures.items()}
            for estimate, measures in found.items()
        }
        return {NORM: np.mean(norms, axis=0).tolist(), "by_estimate": by_estimate}

    @torch.inference_mode()
    def _of_protein(
        self, model: PretrainedModel, sequence: str
    ) -> Iterator[tuple[Tensor, dict[str, dict[str, Tensor]]]]:
        """Yields E|q̂ + k̂|² and the measures by estimate of each layer."""
        batch = model.tokenize([sequence])
        inputs = model.network.attention_inputs(batch.tokens_BL, batch.mask_BL, causal=model.causal)
        for layer, x in inputs:

            def map_of(mechanism: Attention, x: AttentionInputs = x) -> Tensor:
                return mechanism.attention_map(x.q_BHLK, x.k_BHLK, **x.rest)[0].cpu()

            q, k = (some.bfloat16().to(some.dtype) for some in (x.q_BHLK, x.k_BHLK))
            rounded = replace(x, q_BHLK=q, k_BHLK=k)
            exact_HLL, values = map_of(Softmax()), x.v_BHLC[0].cpu()
            found = {
                "rounded": compare_estimates(exact_HLL, [map_of(Softmax(), rounded)] * 2, values)
            }
            for number in self.features:
                draws = range(self.seed, self.seed + self.draws)
                maps = [map_of(favor(model, number, draw=n)(layer).to(model.device)) for n in draws]
                found[f"R = {number}"] = compare_estimates(exact_HLL, maps, values)
            sums = pair_sums(x.q_BHLK, x.k_BHLK, batch.mask_BL, causal=model.causal)
            yield SquareNorms.of(sums).sum_H.double().cpu(), found

    def _costs(
        self, model: PretrainedModel, measure: Callable[[PretrainedModel], float | None], what: str
    ) -> dict[str, Any]:
        """Returns a measure with own attention, softmax, and one draw of each estimate by layer."""
        layers = range(1, model.num_layers + 1)
        places = {**{str(n): [n] for n in layers}, "all": layers}

        exact = with_attention(model, lambda layer: Softmax(), layers)
        found: dict[str, Any] = {"own": measure(model), "softmax": measure(exact)}
        asked = [*product(self.features, places)]
        for number, place in watched(f"{what} with replaced attention", asked):
            mechanism = favor(model, number, draw=self.seed)
            replaced = with_attention(model, mechanism, places[place])
            found.setdefault(f"R = {number}", {})[place] = measure(replaced)
        return found


def _cost_cells(values: Mapping[str, Any], estimate: str, place: str | None) -> tuple[str, str]:
    """Returns perplexity and P@L with the attention of a layer, or of all, replaced."""
    cells = []
    for name, style in (("perplexity", ".2f"), ("contacts", ".1%")):
        cost = values.get(name, {}).get(estimate)
        cost = cost if place is None or cost is None else cost[place]
        cells.append("" if cost is None else f"{cost:{style}}")
    return cells[0], cells[1]
