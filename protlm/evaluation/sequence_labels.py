"""Classes of whole sequences, such as subcellular locations, by a linear probe.

The probe, on mean embeddings of the model, and its baselines are those of `protlm probe`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from protlm.config.data import TOKENS_PER_BATCH
from protlm.downstream.labels import read_labeled_proteins
from protlm.downstream.probe_results import comparison, metric_rows, scores_of
from protlm.downstream.probing import ProbeOptions, probe
from protlm.downstream.splits import leakage, split_of
from protlm.downstream.tasks import Task, refuse_many_classes, targets_of
from protlm.evaluation.base import NO_SPLIT, Evaluation, EvaluationData, ResultTable
from protlm.model.pretrained import PretrainedModel
from protlm.system.errors import InputDataError, UserError


@final
class SequenceLabels(Evaluation):
    """Accuracy, macro-F1 and MCC of a logistic regression from embeddings to classes.

    The table of labels decides by its splits whether homologs are on both sides. Of proteins that
    are longer than the model accepts, the first residues are embedded.
    """

    needs_data = False

    def __init__(
        self,
        *,
        labels: str | None = None,
        sequences: str | None = None,
        tokens_per_batch: int = TOKENS_PER_BATCH,
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
        """Returns accuracy and other metrics with 95 % intervals, by predictor.

        Intervals are over sequences, or over clusters if the table has a column `cluster`.
        """
        proteins = read_labeled_proteins(self.labels, sequences=self.sequences, per_residue=False)
        examples = proteins.examples
        if not any(one.split for one in examples):
            raise InputDataError(f"{self.labels} has no splits; add a column with train and test")
        sequences = [one.sequence for one in examples]
        targets = targets_of([one.label for one in examples], Task.one_class)
        refuse_many_classes(targets)
        split = split_of(examples, seed=self.seed)
        options = ProbeOptions(tokens_per_batch=self.tokens_per_batch, seed=self.seed)
        found = probe(model, sequences, targets, split, options)
        longest = model.max_residues or max(map(len, sequences))
        return {
            **scores_of(found, targets.task),
            "sequences": split.sides(),
            "classes": targets.classes,
            "left_out": dict(proteins.left_out),
            "cropped": sum(len(sequence) > longest for sequence in sequences),
            "leakage": leakage(examples, split).describe(len(split.test)),
        }

    def table(self, results: Mapping[str, dict[str, Any]]) -> ResultTable:
        values = results[NO_SPLIT]
        headings, *rows = metric_rows(values)
        number, classes = values["sequences"]["test"], len(values["classes"])
        lines = [f"{number:,} sequences of {classes} classes; {comparison(values)}"]
        lines += [f"left out: {count:,} {why}" for why, count in values["left_out"].items()]
        if values["cropped"]:
            lines.append(f"embedded in part, for their length: {values['cropped']:,}")
        if values["leakage"]:
            lines.append(f"warning: {values['leakage']}")
        return ResultTable(headings, rows, "\n".join(lines))
