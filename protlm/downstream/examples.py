"""Labels for the commands that learn them: read, checked against the model, and clustered."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import shorten

import numpy as np

from protlm.data.relatives import MIN_SHARED, highest_shared_fractions
from protlm.data.tables import read_clusters
from protlm.downstream.label_files import FITTED, SUFFIX
from protlm.downstream.labels import LabeledProteins, read_labeled_proteins
from protlm.downstream.splits import (
    Leakage,
    Split,
    folds_of,
    held_out,
    leakage,
    split_of,
    with_clusters,
)
from protlm.downstream.tasks import SEPARATOR, Targets, guess_task, refuse_many_classes, targets_of
from protlm.model.memory import Room
from protlm.options.labels import LabelOptions, Task
from protlm.system.errors import InputDataError, UserError
from protlm.system.terminal import printable

_MOST_NAMED = 20
_LONGER, _UNFIT = "longer than", "that do not fit into the memory"


@dataclass(frozen=True)
class Labeled:
    """Proteins with their labels, as numbers, and their split."""

    proteins: LabeledProteins
    targets: Targets
    split: Split
    leakage: Leakage
    folds: Mapping[str, Split] = field(default_factory=dict)

    @property
    def leaks(self) -> str | None:
        """A sentence on the test proteins that have a relative in train or valid, or None."""
        return self.leakage.describe(len(self.split.test))

    @property
    def sequences(self) -> list[str]:
        """The sequences of the proteins."""
        return [one.sequence for one in self.proteins.examples]


def read_labeled(
    path: Path, room: Room, reading: LabelOptions, *, seed: int, valid_fraction: float | None = None
) -> Labeled:
    """Reads, checks and splits labels; `valid` gets a fraction of `train` if it is empty."""
    proteins = read_examples(path, room, reading)
    targets = targets_from(path, proteins, reading)
    proteins = _clustered(proteins, reading)
    folds = {} if reading.form.fold is None else folds_of(proteins.examples, seed=seed)
    split = next(iter(folds.values()), None) or split_of(proteins.examples, seed=seed)
    if valid_fraction is not None and not split.valid.size:
        is_out = held_out(split.groups[split.train], valid_fraction, seed=seed)
        split = replace(split, train=split.train[~is_out], valid=split.train[is_out])
    return Labeled(proteins, targets, split, leakage(proteins.examples, split), folds)


def read_examples(path: Path, room: Room, reading: LabelOptions) -> LabeledProteins:
    """Returns the examples that the model accepts and the memory has room for."""
    proteins = read_labeled_proteins(
        path,
        sequences=reading.sequences,
        per_residue=reading.of_residues,
        form=reading.form,
    )
    limits = [limit for limit in (room.model.max_residues, reading.longest) if limit]
    longest = min(limits, default=max(len(one.sequence) for one in proteins.examples))
    fits = [len(one.sequence) <= longest for one in proteins.examples]
    if not any(fits):
        raise InputDataError(f"{path}: all proteins are longer than the {longest} that fit")
    found = proteins.only(fits, f"{_LONGER} the {longest:,} residues that the model accepts")
    refused = [room.refusal(len(one.sequence)) for one in found.examples]
    for one, reason in zip(found.examples, refused, strict=True):
        if reason:
            print(printable(f"skipped {one.identifier}: {reason}"), file=sys.stderr)
    if all(refused):
        raise InputDataError(f"{path}: no protein fits into the memory; give shorter ones")
    found = found.only([not one for one in refused], _UNFIT)
    if not reading.apart:
        return found
    tested = [one.sequence for one in found.examples if one.split not in FITTED]
    sequences = [one.sequence for one in found.examples]
    shared = highest_shared_fractions(sequences, tested, enough=MIN_SHARED)
    kept = [
        one.split not in FITTED or share < MIN_SHARED
        for one, share in zip(found.examples, shared, strict=True)
    ]
    return found.only(kept, "of train or valid that are relatives of a test protein")


def left_out_by_length(reason: str) -> bool:
    """Whether a reason for proteins that are left out is that of long ones."""
    return reason.startswith((_LONGER, _UNFIT))


def targets_from(path: Path, proteins: LabeledProteins, reading: LabelOptions) -> Targets:
    """Returns the labels as numbers, and prints on standard error what they were taken for."""
    labels = [one.label for one in proteins.examples]
    if reading.form.columns:
        reading = replace(reading, task=Task.several_classes, separator=SEPARATOR)
    task = _task_of(labels, proteins, reading)
    targets = targets_of(labels, task, min_count=reading.min_count, separator=reading.separator)
    if reading.task is None:
        refuse_many_classes(targets)
    listed = shorten(", ".join(targets.classes), 80, placeholder=" ...")
    names = f" of {len(targets.classes)} classes ({listed})"
    all_residues = sum(len(one.sequence) for one in proteins.examples)
    of = f", {len(targets.values):,} of {all_residues:,} residues" if task.of_residues else ""
    if not targets.classes:
        are_few = reading.task is None and 5 * len(set(labels)) <= len(labels)
        names = " (if these are names of classes, choose the task class)" if are_few else ""
    rows = len(labels) + sum(proteins.left_out.values())
    more = f" and {len(reading.form.others)} more" if reading.form.others else ""
    taken = f"{path}{more}: task: {task}{names}"
    parts = [taken, f"{len(labels):,} of {rows:,} rows are used{of}"]
    if targets.classes:
        values, verb = targets.values, "have" if targets.values.ndim == 2 else "are"
        counts = np.bincount(values) if values.ndim == 1 else values.sum(axis=0)
        ends = ((n, counts[n] / len(values)) for n in np.argsort(counts, kind="stable")[[-1, 0]])
        parts.append(" and ".join(f"{x:.1%} {verb} {targets.classes[n]}" for n, x in ends))
    said = {"masked": proteins.masked, "left out": proteins.left_out, "changed": proteins.changed}
    parts += [
        f"{what}: " + ", ".join(f"{n:,} {why}" for why, n in counts.items())
        for what, counts in said.items()
        if counts
    ]
    if not targets.classes:
        parts.append(f"from {targets.values.min():g} to {targets.values.max():g}")
    commas = sum("," in label for label in labels)
    if proteins.in_both:
        both = ", ".join(proteins.in_both[:_MOST_NAMED])
        parts.append(f"{len(proteins.in_both):,} in train or valid stay in the test only: {both}")
    if reading.form.header == "header" and any(map(SUFFIX.search, labels)):
        parts.append("-M, -S and -U at the end are kept (labels read as location lack them)")
    if commas and targets.classes and not proteins.per_residue and "," not in reading.separator:
        parts.append(f"{commas:,} labels have commas, which are not the separator of classes")
    print(printable("; ".join(parts)), file=sys.stderr)
    return targets


def _task_of(labels: Sequence[str], proteins: LabeledProteins, reading: LabelOptions) -> Task:
    if reading.task is None:
        return guess_task(
            labels,
            per_residue=proteins.per_residue,
            separator=reading.separator,
            places=[one.place for one in proteins.examples],
        )
    if proteins.per_residue != reading.task.of_residues:
        raise UserError(
            f"the task {reading.task} does not suit labels of "
            f"{'residues' if proteins.per_residue else 'whole proteins'}",
            {"task": None},
        )
    return reading.task


def _clustered(proteins: LabeledProteins, reading: LabelOptions) -> LabeledProteins:
    examples = proteins.examples
    if reading.cluster is not None:
        numbers = reading.cluster([one.sequence for one in examples])
        clusters = {
            one.identifier: str(number) for one, number in zip(examples, numbers, strict=True)
        }
    elif reading.cluster_table is not None:
        clusters = {
            member: representative
            for _, representative, member in read_clusters(reading.cluster_table)
        }
    else:
        return proteins
    found = with_clusters(examples, clusters)
    if number := sum(not one.cluster for one in found):
        print(
            f"warning: {reading.cluster_table} lacks {number:,} of {len(examples):,} "
            "proteins; each is a cluster by itself, so its homologs may be on the other side",
            file=sys.stderr,
        )
    return replace(proteins, examples=found)
