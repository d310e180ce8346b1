"""`protlm probe LABELS -m MODEL -o PROBE`: labels predicted from frozen embeddings."""

from dataclasses import replace
from itertools import count
from pathlib import Path

from protlm.downstream.examples import LabelOptions, read_labeled
from protlm.downstream.probe_results import (
    Probe,
    Result,
    print_result,
    write_predictions,
    write_probe,
    write_result,
)
from protlm.downstream.probing import MODEL, ProbeOptions, probe
from protlm.loading import load_model
from protlm.model.memory import Room
from protlm.system.paths import check_output, complete_folder
from protlm.system.terminal import JobProgress

# The model, random weights, and at most four baselines.
_PREDICTORS = 6


def probe_labels(
    labels: Path,
    model_path: Path,
    output: Path,
    options: ProbeOptions,
    reading: LabelOptions,
    *,
    device: str = "auto",
) -> Result:
    """Fits a probe and its baselines, prints the metrics, and writes the probe, a new folder."""
    check_output(output)
    model = load_model(model_path, device=device)
    layers = dict.fromkeys(model.layer_number(layer, first=0) for layer in options.layers)
    options = replace(options, layers=tuple(layers))
    labeled = read_labeled(labels, Room(model), reading, seed=options.seed)
    targets = labeled.targets
    with JobProgress("predictors", _PREDICTORS) as progress:
        done = count()
        found = probe(
            model,
            labeled.sequences,
            targets,
            labeled.split,
            options,
            report=lambda name: progress.update(next(done), name),
        )
        progress.update(next(done))
    result = Result(model_path.name, model.hash, labeled, found)
    best = found[MODEL]
    assert best.layer is not None
    fitted = Probe(targets.task, targets.classes, best.layer, model.hash, best.fitted)
    with complete_folder(output) as folder:
        write_result(folder, result, options)
        write_predictions(folder, result)
        write_probe(folder, fitted)
    print_result(result)
    print(output)
    return result
