"""Retrieval of relatives as nearest neighbors in the space of embeddings.

Each sequence of the split is a query among sequences of the training split; relatives have the same
label, for instance the same 30 % cluster. A sequence is no neighbor of itself, so that a split may
be searched in itself. Mean embeddings are compared by cosine; baselines are random weights,
composition and 3-mers.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

import numpy as np

from protlm.analysis.bootstrap import ratio_of
from protlm.analysis.intervals import HEADING, score_cells, shown
from protlm.data.batching.order import EpochOrder
from protlm.data.shards.data_set import SplitReader
from protlm.data.tables import read_labels
from protlm.data.vocabulary import VOCABULARY
from protlm.downstream.probing import compositions, three_mers
from protlm.evaluation.base import Evaluation, EvaluationData, ResultTable, compared
from protlm.model.embedding import embeddings
from protlm.model.pretrained import PretrainedModel
from protlm.system.errors import InputDataError, OptionError, UserError

_PREDICTORS = ("model", "random_weights", "composition", "three_mers", "chance")


@final
class Retrieval(Evaluation):
    """Top-1 accuracy and mean average precision (mAP) of relatives among the nearest neighbors.

    Queries without a relative in the gallery are excluded and counted. The gallery is a random
    sample of the training sequences.
    """

    def __init__(
        self,
        *,
        labels: str | None = None,
        column: str = "cluster30",
        max_gallery: int = 20_000,
        layer: int = -1,
        seed: int = 0,
    ) -> None:
        if labels is None:
            raise UserError(
                "evaluation.retrieval.labels has no value; type evaluation.retrieval.labels=TABLE, "
                "tab-separated, with the columns accession and evaluation.retrieval.column"
            )
        if max_gallery < 1:
            raise OptionError(f"max_gallery={max_gallery} leaves an empty gallery; give 1 or more")
        self.labels, self.column = Path(labels), column
        self.max_gallery, self.layer, self.seed = max_gallery, layer, seed

    def run(self, model: PretrainedModel, data: EvaluationData | None) -> dict[str, Any]:
        """Returns top-1 and mAP with 95 % intervals over queries, by predictor, and the counts."""
        assert data is not None
        label_of = {
            accession: label
            for accession, label in read_labels(self.labels, "accession", self.column).items()
            if label
        }
        order = EpochOrder(len(data.train), seed=self.seed, epoch=0)
        drawn = order[np.arange(min(len(data.train), self.max_gallery))].tolist()
        gallery, gallery_labels = _labeled(data.train, drawn, label_of)
        queries, labels = _labeled(data.split, range(len(data.split)), label_of)
        numbers = {one: n for n, one in enumerate({*queries, *gallery})}
        sides = [np.array([numbers[one] for one in some]) for some in (queries, gallery)]
        is_self = sides[0][:, None] == sides[1]
        truth = (labels[:, None] == gallery_labels) & ~is_self
        relevant = truth.any(axis=1)
        if not relevant.any():
            raise InputDataError(
                f"no sequence of the split shares its {self.column} in {self.labels} with one of "
                "the training split; choose another split or column"
            )
        queries = [query for query, keep in zip(queries, relevant, strict=True) if keep]
        result: dict[str, Any] = {
            who: _scores(
                np.where(is_self[relevant], -np.inf, similarity), truth[relevant], self.seed
            )
            for who, similarity in self._similarities(model, data, queries, gallery)
        }
        return {
            **result,
            "queries": len(queries),
            "without_relative": int((~relevant).sum()),
            "gallery": len(gallery),
            "column": self.column,
            "layer": model.layer_number(self.layer, first=0),
        }

    def table(self, results: Mapping[str, dict[str, Any]]) -> ResultTable:
        rows, lines = [], []
        for split, values in results.items():
            lines.append(
                f"{split}: embeddings of layer {values['layer']}; {values['without_relative']:,} "
                f"queries without a relative of the same {values['column']} left out"
            )
            for who in _PREDICTORS:
                top, average = values[who]["top1"], values[who]["map"]["value"]
                scored = (*score_cells(top, ".1%"), shown(average))
                counts = (f"{values[name]:,}" for name in ("queries", "gallery"))
                rows.append((split, who, *scored, *counts))
        columns = ("split", "retrieval by", "top-1", HEADING, "mAP", "queries", "gallery")
        return ResultTable(columns, rows, "\n".join(lines))

    def _similarities(
        self, model: PretrainedModel, data: EvaluationData, queries: list[str], gallery: list[str]
    ) -> Iterator[tuple[str, np.ndarray]]:
        layer = model.layer_number(self.layer, first=0)
        for who, one in compared(model, self.seed).items():
            embedded = [
                embeddings(one, some, layers=[layer], tokens_per_batch=data.tokens_per_batch)[0]
                for some in (queries, gallery)
            ]
            yield who, _cosines(*embedded)
        yield "composition", _cosines(compositions(queries), compositions(gallery))
        known, asked = three_mers(gallery, queries)
        yield "three_mers", (asked @ known.T).toarray()
        chance = np.random.default_rng(self.seed).random((len(queries), len(gallery)))
        yield "chance", chance.astype(np.float32)


def _labeled(
    split: SplitReader, samples: Iterable[int], label_of: Mapping[str, str]
) -> tuple[list[str], np.ndarray]:
    named = [(sample, label_of.get(split.identifier(sample))) for sample in samples]
    kept = [(sample, label) for sample, label in named if label is not None]
    sequences = [VOCABULARY.decode(split[sample]) for sample, _ in kept]
    return sequences, np.array([label for _, label in kept])


def _cosines(queries: np.ndarray, gallery: np.ndarray) -> np.ndarray:
    """Returns cosines after subtracting the mean of the gallery."""
    center = gallery.mean(axis=0)
    sides = [
        centered / np.maximum(np.linalg.norm(centered, axis=1, keepdims=True), 1e-12)
        for centered in (queries - center, gallery - center)
    ]
    return sides[0] @ sides[1].T


def _scores(similarity: np.ndarray, truth: np.ndarray, seed: int) -> dict[str, Any]:
    top1, average = np.empty(len(truth)), np.empty(len(truth))
    for query, (row, is_relative) in enumerate(zip(similarity, truth, strict=True)):
        ranked = is_relative[np.argsort(-row, kind="stable")]
        places = np.flatnonzero(ranked) + 1
        top1[query] = ranked[0]
        average[query] = np.mean(np.arange(1, len(places) + 1) / places)
    ones, found = np.ones(len(truth)), {"top1": top1, "map": average}
    return {name: ratio_of(name, x, ones, seed=seed).to_plain()[name] for name, x in found.items()}
