"""Classes of whole sequences, such as subcellular locations, by a linear probe.

The probe, on mean embeddings of the model, and its baselines are those of `protlm probe`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from protlm.downstream.labels import read_labeled_proteins
from protlm.downstream.probing import ProbeOptions, metric_rows, probe
from protlm.downstream.splits import split_of
from protlm.downstream.tasks import Task, targets_of
from protlm.errors import InputDataError, UserError
from protlm.evaluation.base import NO_SPLIT, Evaluation, EvaluationData, ResultTable
from protlm.model.pretrained import PretrainedModel


@final
class SequenceLabels(Evaluation):
    """Accuracy and macro-F1 of a logistic regression from embeddings to classes.

    Args:
        labels: a tab-separated table with the columns accession, label and split (train, valid or
            test). The table decides whether homologs are on both sides.
        sequences: a sequence file with these accessions; longer sequences than the model accepts
            are cropped.
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
        """Returns accuracy and other metrics with 95 % intervals over sequences, by predictor.

        Raises:
            InputDataError: a file cannot be read, or a labeled sequence is missing.
        """
        examples = read_labeled_proteins(self.labels, sequences=self.sequences).examples
        if not any(one.split for one in examples):
            raise InputDataError(f"{self.labels} has no column split; add one with train and test")
        targets = targets_of([one.label for one in examples], Task.one_class)
        split = split_of(examples, None, seed=self.seed)
        sequences = [one.sequence[: model.max_residues] for one in examples]
        options = ProbeOptions(tokens_per_batch=self.tokens_per_batch, seed=self.seed)
        found = probe(model, sequences, targets, split, options)
        sides = {"train": split.train, "valid": split.valid, "test": split.test}
        return {
            "predictors": {name: one.plain() for name, one in found.items()},
            "sequences": {name: len(rows) for name, rows in sides.items()},
            "classes": targets.classes,
        }

    def table(self, results: Mapping[str, dict[str, Any]]) -> ResultTable:
        """Builds a row for each predictor."""
        values = results[NO_SPLIT]
        headings, *rows = metric_rows(values["predictors"])
        counts = f"{values['sequences']['test']:,} sequences, {len(values['classes'])} classes"
        return ResultTable(headings, rows, counts)
