"""`protlm probe LABELS -m MODEL -o PROBE`: labels predicted from frozen embeddings."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from protlm.build import load_model
from protlm.commands.probe_results import Result, print_result, write_predictions, write_result
from protlm.data.vocabulary import VOCABULARY
from protlm.downstream.labels import LabeledProteins, read_labeled_proteins
from protlm.downstream.probe_files import Probe, write_probe
from protlm.downstream.probing import MODEL, ProbeOptions, probe
from protlm.downstream.splits import leakage, split_of
from protlm.downstream.tables import read_text
from protlm.downstream.tasks import Task, guess_task, targets_of
from protlm.errors import InputDataError, UserError
from protlm.model.pretrained import PretrainedModel
from protlm.paths import check_output, complete_folder
from protlm.terminal import JobProgress, printable

# The model, random weights, and at most four baselines.
_PREDICTORS = 6


@dataclass(frozen=True)
class LabelOptions:
    """How the labels of `protlm probe` are read and split.

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


def probe_labels(
    labels: Path,
    model_path: Path,
    output: Path,
    options: ProbeOptions,
    reading: LabelOptions,
    *,
    device: str = "auto",
) -> Result:
    """Fits a probe and its baselines, prints the metrics, and writes the probe.

    Args:
        labels: a table or a FASTA file.
        model_path: a run, a checkpoint or an exported model.
        output: the new folder.
        options: the settings of the probe.
        reading: how labels are read and split.
        device: as for `protlm.build.pick_device`.

    Raises:
        UserError: options that exclude each other, or a layer that does not exist.
        InputDataError: labels, sequences or clusters cannot be used.
        OutputError: the output exists or cannot be written.
    """
    if options.tokens_per_batch < 1:
        raise UserError(f"--toks-per-batch {options.tokens_per_batch} must be at least 1")
    if reading.cluster is not None and reading.cluster_table is not None:
        raise UserError("--cluster and --cluster-table both give the clusters; omit one of them")
    check_output(output)
    model = load_model(model_path, device=device)
    layers = dict.fromkeys(model.layer_number(layer, first=0) for layer in options.layers)
    options = replace(options, layers=tuple(layers))
    proteins = _read(labels, model, reading)
    examples = proteins.examples
    given = [one.label for one in examples]
    task = _task(given, proteins, reading)
    targets = targets_of(given, task, min_count=reading.min_count)
    clusters = _clusters(proteins, reading)
    split = split_of(examples, clusters, seed=options.seed)
    leaked = leakage(examples, split, clusters)
    with JobProgress("predictors", _PREDICTORS) as progress:
        names: list[str] = []

        def report(name: str) -> None:
            progress.update(len(names), name)
            names.append(name)

        sequences = [one.sequence for one in examples]
        found = probe(model, sequences, targets, split, options, report=report)
        progress.update(len(names))
    result = Result(model_path.name, model.hash, proteins, targets, split, leaked, found)
    best = found[MODEL]
    assert best.layer is not None
    fitted = Probe(task, targets.classes, best.layer, model.hash, best.fitted)
    with complete_folder(output) as folder:
        write_result(folder, result, options)
        write_predictions(folder, result)
        write_probe(folder, fitted)
    print_result(result)
    print(output)
    return result


def _read(path: Path, model: PretrainedModel, reading: LabelOptions) -> LabeledProteins:
    """Returns the examples that the model accepts."""
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


def _task(labels: Sequence[str], proteins: LabeledProteins, reading: LabelOptions) -> Task:
    if reading.task is None:
        return guess_task(labels, per_residue=proteins.per_residue)
    if proteins.per_residue != (reading.task is Task.residue_classes):
        raise UserError(
            f"--task {reading.task} does not suit labels of "
            f"{'residues' if proteins.per_residue else 'whole proteins'}; omit it"
        )
    return reading.task


def _clusters(proteins: LabeledProteins, reading: LabelOptions) -> dict[str, str] | None:
    """Returns the cluster of each identifier; None to use those of the labels, if any."""
    if reading.cluster is not None:
        numbers = reading.cluster([one.sequence for one in proteins.examples])
        pairs = zip(proteins.examples, numbers, strict=True)
        return {one.identifier: str(number) for one, number in pairs}
    if reading.cluster_table is None:
        return None
    return read_clusters(reading.cluster_table)


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
