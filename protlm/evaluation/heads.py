"""Attention heads: what each attends to, and the best alone at contacts.

Statistics as defined in `head_statistics`; clusters by the correlation of pooled maps.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from protlm.analysis.contact_regression import features
from protlm.analysis.head_survey import head_clusters, head_distances, survey_heads
from protlm.analysis.intervals import in_words
from protlm.analysis.precision import METRIC, left_out, scores
from protlm.analysis.structures import Protein, ProteinChoice
from protlm.evaluation.base import NO_SPLIT, Evaluation, EvaluationData, ResultTable, compared
from protlm.model.pretrained import PretrainedModel

_SHOWN = 16
_CLUSTERS = 6
_COLUMNS = {
    "entropy": ".2f",
    "effective_keys": ".1f",
    "mean_distance": ".1f",
    "bandwidth": ".0f",
    "sink_mass": ".3f",
    "symmetry": ".2f",
    "neighbor_mass": ".3f",
    "strand_mass": ".3f",
    "helix_mass": ".3f",
}
_HEADINGS = ("nats", "keys", "distance", "80 % within", "sink", "symmetry", "±1", "±2", "±3,4")


@final
class Heads(Evaluation):
    """Statistics of all heads over proteins, and the single head that predicts contacts best.

    The best head is chosen on `fit_structures` and scored on `structures`. Proteins are as for
    `ProteinChoice`.
    """

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
        """Returns means over proteins by layer and head, and scores of the best head."""
        proteins = self.test.read(model)
        result: dict[str, Any] = {"num_proteins": len(proteins)}
        for who, one in compared(model, self.seed).items():
            survey = survey_heads(one, proteins, f"heads, {who}")
            result[who] = {name: _plain(x) for name, x in survey.means().items()}
            if self.test.sequences is None:
                result["num_with_pairs"] = int((~np.isnan(survey.precisions[:, 0, 0])).sum())
                result[who]["best_head"] = self._best_head(one, proteins)
            if who == "model":
                labels = head_clusters(head_distances(survey.pooled), _CLUSTERS)
                result["clusters"] = labels.reshape(survey.statistics["entropy"].shape[1:]).tolist()
        return result

    def table(self, results: Mapping[str, dict[str, Any]]) -> ResultTable:
        values = results[NO_SPLIT]
        found = {who: _arrays(values[who]) for who in ("model", "random_weights")}
        own = found["model"]
        key = -own["contact_precision"] if "contact_precision" in own else own["entropy"]
        places = np.argsort(key, axis=None, kind="stable").tolist()
        order = [divmod(place, key.shape[1]) for place in places]
        clusters = np.array(values["clusters"])
        rows = [
            *(
                (f"{at[0] + 1}-{at[1] + 1}", *_cells(own, at), str(clusters[at]))
                for at in order[:_SHOWN]
            ),
            *((f"{who}, mean of heads", *_cells(x, ...), "") for who, x in found.items()),
        ]
        columns = ("layer-head", *_HEADINGS, "P@L", "cluster")
        return ResultTable(columns, rows, caption="\n".join(_caption(values, len(order))))

    def _best_head(self, model: PretrainedModel, proteins: Sequence[Protein]) -> dict[str, Any]:
        survey = survey_heads(model, self.fit.read(model), "choosing the best head")
        precisions = np.nan_to_num(survey.means()["contact_precision"])
        layer, head = divmod(int(precisions.argmax()), model.num_heads)
        predicted = []
        for protein in proteins:
            batch = model.tokenize([protein.sequence])
            (map_BHLL,) = model.attention_maps(batch, [layer + 1], [head + 1]).values()
            inner = model.vocabulary.inner
            residues = map_BHLL[:, :, inner, inner].float().numpy()
            predicted.append((features(residues)[0], protein.contacts()))
        return {"layer": layer + 1, "head": head + 1, "scores": scores(predicted, seed=self.seed)}


def _plain(values: np.ndarray) -> list[Any]:
    plain = values.astype(object)
    plain[np.isnan(values)] = None
    return plain.tolist()


def _arrays(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {
        name: np.array(values[name], dtype=float)
        for name in (*_COLUMNS, "contact_precision")
        if name in values
    }


def _cells(found: Mapping[str, np.ndarray], where: Any) -> tuple[str, ...]:
    cells = [f"{np.mean(found[name][where]):{style}}" for name, style in _COLUMNS.items()]
    known = found.get("contact_precision")
    return (*cells, "" if known is None else f"{known[where].mean():.1%}")


def _caption(values: Mapping[str, Any], number: int) -> list[str]:
    lines = [f"means over {values['num_proteins']} proteins; layers and heads from 1"]
    if number > _SHOWN:
        lines[0] += f"; {_SHOWN} of {number} heads, all are in the JSON"
    if "num_with_pairs" in values:
        lines += left_out(values["num_proteins"], values["num_with_pairs"], "6 or more apart")
    for who in ("model", "random_weights"):
        if best := values[who].get("best_head"):
            ranges = [
                f"{separation} {in_words(by_divisor[METRIC], '.1%')}"
                for separation, by_divisor in best["scores"].items()
            ]
            place = f"{best['layer']}-{best['head']}"
            lines.append(f"best head alone, {who}, {place}, {METRIC}: {', '.join(ranges)}")
    return lines
