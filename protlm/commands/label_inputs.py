"""Labels for the commands that learn them: read, checked against the model, and clustered."""

import csv
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from protlm.data.tables import read_text
from protlm.data.vocabulary import VOCABULARY
from protlm.downstream.labels import LabeledProteins, read_labeled_proteins
from protlm.downstream.splits import missing
from protlm.downstream.tasks import Task, guess_task
from protlm.errors import InputDataError, UserError
from protlm.model.pretrained import PretrainedModel
from protlm.terminal import printable


@dataclass(frozen=True)
class LabelOptions:
    """How labels are read and split.

    Attributes:
        sequences: a sequence file, for labels without sequences.
        column: the column of the label; None is `label` or `target`.
        task: the kind of the labels; None guesses it.
        per_residue: the labels of a table are strings with one letter for each residue.
        min_count: with several classes, those of fewer proteins are ignored.
        cluster_table: representative and member, separated by a tab.
        cluster: returns the cluster of each sequence; None does not cluster.
    """

    sequences: Path | None = None
    column: str | None = None
    task: Task | None = None
    per_residue: bool = False
    min_count: int = 1
    cluster_table: Path | None = None
    cluster: Callable[[Sequence[str]], list[int]] | None = None


def read_examples(path: Path, model: PretrainedModel, reading: LabelOptions) -> LabeledProteins:
    """Returns the examples that the model accepts.

    Raises:
        InputDataError: labels or sequences cannot be used.
        UserError: `--cluster` and `--cluster-table`.
    """
    if reading.cluster is not None and reading.cluster_table is not None:
        raise UserError("--cluster and --cluster-table both give the clusters; omit one of them")
    per_residue = reading.per_residue or reading.task is Task.residue_classes
    proteins = read_labeled_proteins(
        path, sequences=reading.sequences, column=reading.column, per_residue=per_residue
    )
    for one in proteins.examples:
        try:
            VOCABULARY.encode(one.sequence)
        except InputDataError as error:
            raise InputDataError(f"{path}: {one.identifier}: {error}") from None
    longest = model.max_residues
    if longest is None:
        return proteins
    fits = [len(one.sequence) <= longest for one in proteins.examples]
    if not any(fits):
        raise InputDataError(f"{path}: all proteins are longer than the {longest} that fit")
    return proteins.only(fits, f"longer than the {longest:,} residues that the model accepts")


def task_of(labels: Sequence[str], proteins: LabeledProteins, reading: LabelOptions) -> Task:
    """Returns the given kind of the labels, or guesses it.

    Raises:
        UserError: the given kind does not suit them.
    """
    if reading.task is None:
        return guess_task(labels, per_residue=proteins.per_residue)
    if proteins.per_residue != (reading.task is Task.residue_classes):
        raise UserError(
            f"--task {reading.task} does not suit labels of "
            f"{'residues' if proteins.per_residue else 'whole proteins'}; omit it"
        )
    return reading.task


def clusters_of(proteins: LabeledProteins, reading: LabelOptions) -> dict[str, str] | None:
    """Returns the cluster of each identifier; None to use those of the labels, if any.

    Raises:
        InputDataError: the cluster table is damaged, or has none of the proteins.
    """
    if reading.cluster is not None:
        numbers = reading.cluster([one.sequence for one in proteins.examples])
        pairs = zip(proteins.examples, numbers, strict=True)
        return {one.identifier: str(number) for one, number in pairs}
    if reading.cluster_table is None:
        return None
    clusters = read_clusters(reading.cluster_table)
    if number := missing(proteins.examples, clusters):
        print(
            f"warning: {reading.cluster_table} lacks {number:,} of {len(proteins.examples):,} "
            "proteins; each is a cluster by itself, so its homologs may be on the other side",
            file=sys.stderr,
        )
    return clusters


def read_clusters(path: Path) -> dict[str, str]:
    """Returns the cluster of each member of a table, the `cluster.tsv` of MMseqs2.

    Raises:
        InputDataError: the table is missing or damaged.
    """
    clusters = {}
    lines = read_text(path, "a cluster table").splitlines()
    for line, row in enumerate(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE), start=1):
        if len(row) != 2:
            raise InputDataError(
                f"{path}, line {line}: {printable(' '.join(row))[:80]!r} is not a representative "
                "and a member, separated by a tab (the cluster.tsv of MMseqs2)"
            )
        clusters[row[1]] = row[0]
    return clusters
