"""Classes of whole sequences, such as subcellular locations, by a linear probe.

The probe uses mean embeddings of the model; baselines are random weights, composition with length,
3-mers, and the most common class.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import numpy as np

from protlm.analysis.label_tables import read_labels
from protlm.analysis.probes import Examples, class_scores, probe
from protlm.analysis.sequence_features import compositions, mean_embeddings, three_mers
from protlm.data.records import Tally, read_records
from protlm.data.vocabulary import VOCABULARY
from protlm.errors import InputDataError, UserError
from protlm.evaluation.base import NO_SPLIT, Evaluation, EvaluationData, ResultTable
from protlm.model.pretrained import PretrainedModel

TEST = "test"


@final
class SequenceLabels(Evaluation):
    """Accuracy and macro-F1 of a logistic regression from embeddings to classes.

    Args:
        labels: a tab-separated table with the columns accession, label and split; rows of the
            split `test` are the test set, all others are fitted to. The table decides whether
            homologs are on both sides.
        sequences: a sequence file with these accessions.
        tokens_per_batch: batch size of the embedding.
        seed: seed of random weights, held-out sequences and bootstrap.
    """

    needs_data = False

    def __init__(
        self,
        *,
        labels: str | None = None,
        sequences: str | None = None,
        tokens_per_batch: int = 16_384,
        seed: int = 0,
    ) -> None:
        for name, value in (("labels", labels), ("sequences", sequences)):
            if value is None:
                raise UserError(
                    f"evaluation.sequence_labels.{name} has no value; type "
                    "evaluation.sequence_labels.labels=TABLE.tsv "
                    "evaluation.sequence_labels.sequences=FILE.fasta"
                )
        self.labels, self.sequences = Path(str(labels)), Path(str(sequences))
        self.tokens_per_batch, self.seed = tokens_per_batch, seed

    def run(self, model: PretrainedModel, data: EvaluationData | None) -> dict[str, Any]:
        """Returns accuracy and macro-F1 with 95 % intervals over sequences, by predictor.

        Raises:
            InputDataError: a file cannot be read, or a labeled sequence is missing.
        """
        table = list(read_labels(self.labels, ("accession", "label", "split")))
        found = self._sequences({accession for accession, _, _ in table})
        classes = sorted({label for _, label, _ in table})
        sides = []
        for is_test in (False, True):
            rows = [(a, label) for a, label, split in table if (split == TEST) == is_test]
            if not rows:
                raise InputDataError(
                    f"{self.labels} has no rows {'of' if is_test else 'outside'} the split {TEST}"
                )
            numbers = np.array([classes.index(label) for _, label in rows])
            sides.append(([found[accession] for accession, _ in rows], numbers))
        (fit, fit_labels), (test, test_labels) = sides
        result: dict[str, Any] = {}
        for who, features in self._features(model, fit, test).items():
            result[who] = self._scored(*features, fit_labels, test_labels)
        most_common = np.full_like(test_labels, np.bincount(fit_labels).argmax())
        each = np.arange(len(test_labels))
        result["constant"] = class_scores(most_common, test_labels, each, seed=self.seed)
        return result | {"num_fit": len(fit), "num_test": len(test), "classes": classes}

    def table(self, results: Mapping[str, dict[str, Any]]) -> ResultTable:
        """Builds a row for each predictor."""
        values, rows = results[NO_SPLIT], []
        for who in ("model", "random_weights", "composition", "three_mers", "constant"):
            accuracy, f1 = values[who]["accuracy"], values[who]["macro_f1"]
            interval = f"{accuracy['low']:.1%} to {accuracy['high']:.1%}"
            layer = str(values[who].get("layer", ""))
            cells = (f"{accuracy['value']:.1%}", interval, f"{f1['value']:.3f}", layer)
            rows.append((who, *cells, f"{values['num_test']:,}"))
        columns = ("labels by", "accuracy", "95 %", "macro-F1", "layer", "sequences")
        return ResultTable(columns, rows)

    def _sequences(self, wanted: set[str]) -> dict[str, np.ndarray]:
        tally = Tally()
        found = {
            record.identifier: VOCABULARY.encode(record.sequence)
            for record in read_records(self.sequences, tally)
            if record.identifier in wanted
        }
        tally.warn_of_rejected(self.sequences)
        if missing := sorted(wanted - set(found)):
            raise InputDataError(
                f"{self.sequences} lacks {len(missing):,} of the {len(wanted):,} sequences of "
                f"{self.labels}, for instance {missing[0]}"
            )
        return found

    def _features(
        self, model: PretrainedModel, fit: list[np.ndarray], test: list[np.ndarray]
    ) -> dict[str, tuple[list[Any], list[Any]]]:
        """Returns the features of each predictor for both sides, by candidate layer."""
        layers = range(1, model.num_layers + 1)
        features: dict[str, tuple[list[Any], list[Any]]] = {}
        for who, compared_model in (
            ("model", model),
            ("random_weights", model.with_random_weights(self.seed)),
        ):
            both = mean_embeddings(
                compared_model, [*fit, *test], layers=layers, tokens_per_batch=self.tokens_per_batch
            )
            features[who] = [x[: len(fit)] for x in both], [x[len(fit) :] for x in both]
        features["composition"] = [compositions(fit)], [compositions(test)]
        known, asked = three_mers(fit, test)
        features["three_mers"] = [known], [asked]
        return features

    def _scored(
        self, fit: list[Any], test: list[Any], fit_labels: np.ndarray, test_labels: np.ndarray
    ) -> dict[str, Any]:
        each = np.arange(len(test_labels))
        found = probe(
            Examples(fit, fit_labels, np.arange(len(fit_labels))),
            Examples(test, test_labels, each),
            seed=self.seed,
        )
        scores = class_scores(found.predicted, test_labels, each, seed=self.seed)
        layer = {"layer": found.layer + 1} if len(fit) > 1 else {}
        return {**scores, **layer, "inverse_penalty": found.inverse_penalty}
