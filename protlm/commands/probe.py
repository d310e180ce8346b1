"""Labels from frozen embeddings: `protlm probe LABELS -o PROBE`, `predict FASTA -p PROBE`."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

from protlm.analysis.features.autoencoder import read_features
from protlm.data.records import Record
from protlm.data.records.proteins import Proteins
from protlm.data.tables import check_table_output, write_table
from protlm.downstream.examples import Labeled, read_labeled
from protlm.downstream.label_files import with_files
from protlm.downstream.probe_results import (
    Probe,
    Result,
    described,
    name_of_model,
    output_cells,
    output_columns,
    print_result,
    read_probe,
    write_folds,
    write_predictions,
    write_probe,
    write_result,
)
from protlm.downstream.probing import MODEL, probe_folds
from protlm.downstream.splits import leakage
from protlm.loading import load_model
from protlm.model.embedding import embeddings
from protlm.model.memory import Room
from protlm.model.pretrained import PretrainedModel
from protlm.model.relatives import InContexts, drawn_beside, in_contexts
from protlm.options.labels import LabelOptions, PredictOptions, ProbeOptions, ProbeRunOptions
from protlm.system.paths import complete_folder
from protlm.system.terminal import JobProgress, printable

# Records whose outputs are in memory at a time.
_WINDOW = 512


def probe(
    labels: Sequence[str],
    model_path: Path,
    output: Path,
    reading: LabelOptions,
    options: ProbeOptions,
    run: ProbeRunOptions,
) -> None:
    """Fits a probe to files of labels, or prints what would be read."""
    path, form = with_files(labels, reading.form)
    reading = replace(reading, form=form)
    if run.dry_run:
        model = load_model(model_path, device=run.device)
        labeled = read_labeled(path, Room(model), reading, seed=options.seed)
        of = f", in the first of {len(labeled.folds)} folds" if labeled.folds else ""
        print(f"{described(labeled)}{of}")
    else:
        probe_labels(
            path, model_path, output, options, reading, features=run.features, device=run.device
        )


def probe_labels(
    labels: Path,
    model_path: Path,
    output: Path,
    options: ProbeOptions,
    reading: LabelOptions,
    *,
    features: Path | None = None,
    device: str = "auto",
) -> Result:
    """Fits a probe and its baselines, prints the metrics, and writes the probe, a new folder.

    Returns the result, or that of the first fold; sparse `features` are compared with the states.
    """
    model = load_model(model_path, device=device)
    layers = dict.fromkeys(model.layer_number(layer, first=0) for layer in options.layers)
    autoencoder = None if features is None else read_features(features).to(model.device)
    options = replace(options, layers=tuple(layers), autoencoder=autoencoder)
    labeled = read_labeled(labels, Room(model), reading, seed=options.seed)
    names = [one.identifier for one in labeled.proteins.examples]
    contexts = in_contexts(model, options.relatives, names)
    options = replace(options, in_contexts=contexts and (contexts, names))
    folds = labeled.folds or {"": labeled.split}
    found = probe_folds(model, labeled.sequences, labeled.targets, folds, options)
    identity = model.identity
    results = {
        fold: Result(model_path.name, identity, _of_fold(labeled, fold), one)
        for fold, one in found.items()
    }
    queries = zip(names, labeled.sequences, strict=True)
    with drawn_beside(contexts, output, queries), complete_folder(output) as folder:
        for number, result in enumerate(results.values(), start=1):
            # Names of folds are not those of folders.
            place = folder / f"fold-{number}" if labeled.folds else folder
            place.mkdir(exist_ok=True)
            name = name_of_model(model_path, output / place.relative_to(folder))
            _write(place, result, options, name)
        if reading.form.fold is not None:
            write_folds(folder, reading.form.fold, results)
    if not labeled.folds:
        print_result(results[""])
    print(output)
    return next(iter(results.values()))


def _of_fold(labeled: Labeled, fold: str) -> Labeled:
    if not labeled.folds:
        return labeled
    split = labeled.folds[fold]
    return replace(labeled, split=split, leakage=leakage(labeled.proteins.examples, split))


def _write(folder: Path, result: Result, options: ProbeOptions, name: str) -> None:
    best, targets = result.predictors[MODEL], result.labeled.targets
    assert best.layer is not None
    write_result(folder, result, options)
    write_predictions(folder, result)
    found = targets.task, targets.classes, best.layer, result.identity, best.fitted
    contexts = 0 if options.in_contexts is None else options.relatives.family.contexts
    write_probe(folder, Probe(*found, name, contexts))


def predict(
    fasta: Path,
    probe_dir: Path,
    model_path: Path | None,
    output: Path,
    options: PredictOptions | None = None,
) -> None:
    """Writes a row for each protein or residue; the default model is that of the probe."""
    options = options or PredictOptions()
    check_table_output(output)
    probe = read_probe(probe_dir)
    if model_path is None:
        model_path = probe.find_model(probe_dir)
        print(printable(f"the model of the probe: {model_path}"), file=sys.stderr)
    model = load_model(model_path, device=options.device)
    probe.check_model(model)
    asked = options.relatives
    probe.check_contexts(0 if asked.relatives is None else asked.family.contexts)
    proteins = Proteins(fasta, model.max_residues, options.duplicates, refuse=Room(model).refusal)
    contexts = in_contexts(model, asked, (record.identifier for record in proteins))
    names = ["identifier", *(["position", "residue"] if probe.task.of_residues else [])]

    def rows() -> Iterator[list[str]]:
        records = iter(proteins)
        with JobProgress("predicting", len(proteins)) as progress:
            while window := [*islice(records, _WINDOW)]:
                yield from _rows(window, probe, model, contexts, options.tokens_per_batch)
                progress.advance(len(window))

    queries = ((record.identifier, record.sequence) for record in proteins)
    with drawn_beside(contexts, output, queries):
        write_table(output, [*names, *output_columns(probe.classes)], rows())
    proteins.report("predicted")
    print(output)


def _rows(
    records: list[Record],
    probe: Probe,
    model: PretrainedModel,
    contexts: InContexts | None,
    tokens_per_batch: int,
) -> Iterator[list[str]]:
    sequences = [record.sequence for record in records]
    is_residues = probe.task.of_residues
    places = [np.arange(len(one)) for one in sequences] if is_residues else None
    names = [record.identifier for record in records]
    (features,) = embeddings(
        model,
        sequences,
        layers=[probe.layer],
        tokens_per_batch=tokens_per_batch,
        places=places,
        in_contexts=contexts and (contexts, names),
    )
    outputs = probe.outputs(features, [*map(len, sequences)])
    cells = iter(output_cells(outputs, probe.task, probe.classes))
    for record in records:
        if is_residues:
            for position, residue in enumerate(record.sequence, start=1):
                yield [record.identifier, str(position), residue, *next(cells)]
        else:
            yield [record.identifier, *next(cells)]
