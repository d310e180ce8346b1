"""`protlm finetune LABELS -m MODEL -o RUN`: a model that is trained further on labels."""

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from protlm.checkpoints.format import Checkpoint, export
from protlm.downstream.examples import Labeled, read_labeled
from protlm.downstream.label_files import with_files
from protlm.downstream.linear import LinearModel, fit, trainable
from protlm.downstream.metrics import LABEL_METRICS, label_scores
from protlm.downstream.probe_results import (
    Probe,
    Result,
    print_result,
    write_predictions,
    write_probe,
    write_result,
)
from protlm.downstream.probing import MODEL, FittedHead, probe, scores_of_test
from protlm.loading import load_model, pick_device
from protlm.model.embedding import embeddings
from protlm.model.memory import Room
from protlm.model.pretrained import PretrainedModel
from protlm.options.labels import FinetuneOptions, LabelOptions, ProbeOptions, Task
from protlm.system.errors import ExitCode, OutputError, UserError
from protlm.system.lock import FolderLock
from protlm.system.paths import complete_folder
from protlm.system.work_folder import Kind, begun_with, work_folder
from protlm.training import lora
from protlm.training.finetuning import check_devices, finetune
from protlm.training.labels import (
    LabeledData,
    LabeledTokens,
    LabelLearning,
    Metric,
)
from protlm.training.launch import is_first_rank

ADAPTER, HEAD, MERGED = "adapter", "probe", "model"
FROZEN = "frozen"
_VALID_FRACTION = 0.15
_FINETUNING = Kind("fine-tuning", "being trained", "--output")


def finetune_files(
    labels: Sequence[str],
    model_path: Path,
    output: Path,
    reading: LabelOptions,
    options: FinetuneOptions,
    device: str,
) -> None:
    """Trains a model on files of labels."""
    path, form = with_files(labels, reading.form)
    training = replace(options.training, device=str(pick_device(device)))
    options, reading = replace(options, training=training), replace(reading, form=form)
    finetune_labels(path, model_path, output, options, reading, device=device)


def finetune_labels(
    labels: Path,
    model_path: Path,
    output: Path,
    options: FinetuneOptions,
    reading: LabelOptions,
    *,
    device: str = "auto",
) -> Result | None:
    """Trains a model on labels, compares it with a probe of the frozen one, and writes it.

    The output gets the merged model, its head and the adapters.
    """
    check_devices(options.training)
    refuse_complete(output)
    # Lightning moves the model of another rank to its own device.
    model = load_model(model_path, device=device if is_first_rank() else "cpu")
    if options.rank is not None:
        lora.check_targets(model.network, options.targets)
        if options.rank > (width := model.description.model.model_dim):
            raise UserError(f"--lora {options.rank} must be at most {width}, the model's width")
    # All ranks have to train on the same proteins, whatever memory each has.
    several = options.training.devices > 1
    room = Room(model, short=sys.maxsize) if several else Room(model, training=True)
    seed = options.training.seed
    labeled = read_labeled(labels, room, reading, seed=seed, valid_fraction=_VALID_FRACTION)
    settings = {
        **{f"--{name.replace('_', '-')}": value for name, value in vars(options.training).items()},
        "--lora": options.rank,
        "--lora-targets": ",".join(options.targets),
        **fingerprint(labeled),
    }
    begun = begun_with(
        settings, files={"the file of labels": labels}, models={"the model": model.identity}
    )
    with run_folder(output, begun, break_lock=options.break_lock) as lock:
        work = _Work(model, labeled, options, lock)
        result = Result(model_path.name, model.identity, labeled, _found(work, output))
        _write(work, result, output)
    print_result(result)
    print(output)
    return result


@dataclass(frozen=True)
class _Work:
    """What is trained, and on what."""

    model: PretrainedModel
    labeled: Labeled
    options: FinetuneOptions
    lock: FolderLock | None

    def check(self) -> None:
        assert self.lock is not None
        self.lock.check()


def _probing(work: _Work) -> ProbeOptions:
    training = work.options.training
    return ProbeOptions((work.model.num_layers,), training.tokens_per_batch, training.seed)


def _found(work: _Work, output: Path) -> dict[str, FittedHead]:
    """Returns the fine-tuned model, the frozen one and the baselines; ends other ranks."""
    if not is_first_rank():
        width = work.model.description.model.model_dim
        # It gets the weights of the first rank.
        sys.exit(_train(work, nn.Linear(width, len(work.labeled.targets.classes) or 1), output))
    labeled = work.labeled
    compared = probe(work.model, labeled.sequences, labeled.targets, labeled.split, _probing(work))
    head = _head(work, compared[MODEL])
    if code := _train(work, head, output):
        print(f"stopped; the same command continues {output}", file=sys.stderr)
        sys.exit(code)
    return {MODEL: _tuned(work, head), FROZEN: compared.pop(MODEL), **compared}


def _write(work: _Work, result: Result, output: Path) -> None:
    """Writes the head with its results, then the merged model, which completes the run."""
    model, targets, check = work.model, work.labeled.targets, work.check
    head = result.predictors[MODEL].fitted
    with complete_folder(output / HEAD, overwrite=True, check=check) as folder:
        write_result(folder, result, _probing(work))
        write_predictions(folder, result)
        found = targets.task, targets.classes, model.num_layers, model.identity, head
        write_probe(folder, Probe(*found, f"../{MERGED}"))
    weights = dict(model.network.state_dict())
    export(Checkpoint(output, model.description, weights), output / MERGED, check=check)


def _head(work: _Work, frozen: FittedHead) -> nn.Linear:
    """Returns a head that is fitted to the frozen embeddings of `train`."""
    targets, proteins = work.labeled.targets, work.labeled.split.train
    assert frozen.penalty is not None
    labels, classes = targets.values[targets.rows_of(proteins)], len(targets.classes)
    states, penalty = _states(work, proteins), frozen.penalty
    fitted = fit(states, labels, targets.task, num_classes=classes, penalty=penalty)
    fitted = trainable(fitted, labels, targets.task, num_classes=classes)
    head = nn.Linear(*fitted.weights.shape)
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(fitted.weights.T))
        head.bias.copy_(torch.from_numpy(fitted.bias))
    return head.to(work.model.device)


def _states(work: _Work, proteins: np.ndarray) -> np.ndarray:
    """Returns the last hidden states of proteins, or of their labeled residues, float32."""
    model, places = work.model, work.labeled.targets.places
    (states,) = embeddings(
        model,
        [work.labeled.sequences[row] for row in proteins],
        layers=[model.num_layers],
        tokens_per_batch=work.options.training.tokens_per_batch,
        places=None if places is None else [places[row] for row in proteins],
    )
    return states


def _labeled(work: _Work, proteins: np.ndarray) -> LabeledTokens:
    targets, words = work.labeled.targets, work.model.vocabulary
    return LabeledTokens(
        [words.encode(work.labeled.sequences[row]) for row in proteins],
        targets.values[targets.rows_of(proteins)],
        None if targets.places is None else [targets.places[row] for row in proteins],
        words,
    )


def _metric(task: Task) -> Metric:
    name = LABEL_METRICS[task][0]

    def of(outputs: np.ndarray, values: np.ndarray, groups: np.ndarray) -> float:
        return label_scores(outputs, values, groups, task, resamples=0).values[name]

    return Metric(name, of)


def _train(work: _Work, head: nn.Linear, output: Path) -> ExitCode:
    """Trains the model and its head in place; adapters are written and merged."""
    model, options = work.model, work.options
    if options.rank is not None:
        lora.add_adapters(
            model.network, rank=options.rank, targets=options.targets, seed=options.training.seed
        )
    training = options.training
    data = LabeledData(
        *(_labeled(work, rows) for rows in (work.labeled.split.train, work.labeled.split.valid)),
        batch_size=training.batch_size,
        seed=training.seed,
    )
    module = LabelLearning(
        model.network,
        head,
        task=work.labeled.targets.task,
        metric=_metric(work.labeled.targets.task),
        data=data,
        causal=model.causal,
        settings=training,
    )
    code = finetune(module, data, folder=output, settings=training, lock=work.lock)
    if code or options.rank is None or not is_first_rank():
        return code
    with complete_folder(output / ADAPTER, overwrite=True, check=work.check) as folder:
        lora.save_adapters(model.network, folder)
    lora.merge_adapters(model.network)
    return code


def _tuned(work: _Work, head: nn.Linear) -> FittedHead:
    model, targets, proteins = work.model, work.labeled.targets, work.labeled.split.test
    model.network.eval().requires_grad_(True)
    weights, bias = (one.detach().cpu().double().numpy() for one in (head.weight, head.bias))
    fitted = LinearModel(weights.T, bias)
    outputs = fitted.outputs(_states(work, proteins))
    seed = work.options.training.seed
    scores, by_set = scores_of_test(outputs, targets, work.labeled.split, seed=seed)
    return FittedHead(fitted, model.num_layers, None, {}, scores, outputs, by_set)


def refuse_complete(output: Path) -> None:
    """Makes sure that a run is not complete."""
    # Unlike that of Path, this is false in a folder that cannot be read.
    if os.path.exists(output / MERGED):  # noqa: PTH110
        raise OutputError(f"{output} is complete: remove it or choose another name")


@contextmanager
def run_folder(
    output: Path, begun_with: Mapping[str, Any], *, break_lock: bool
) -> Iterator[FolderLock | None]:
    """Yields the lock of the folder of a new run or of the same one; None on other ranks."""
    if not is_first_rank():
        yield None
        return
    with work_folder(output, begun_with, _FINETUNING, break_lock=break_lock) as work:
        # The command says itself how to continue.
        work.is_quiet = True
        refuse_complete(output)
        yield work.lock


def fingerprint(labeled: Labeled) -> dict[str, str]:
    """Returns hashes of what is trained on."""
    targets, split = labeled.targets, labeled.split
    return {
        "the values of the labels (--label, --task, --min-count)": _digest(
            [targets.task, *targets.classes], targets.values
        ),
        "the split (--cluster-table, --cluster, --seed)": _digest(
            [], split.train, split.valid, split.test, split.groups
        ),
        "the sequences (--sequences)": _digest(labeled.sequences),
    }


def _digest(names: Sequence[str], *arrays: np.ndarray) -> str:
    digest = hashlib.sha256(json.dumps(list(names)).encode())
    for one in arrays:
        digest.update(f"{one.dtype} {one.shape}".encode())
        digest.update(np.ascontiguousarray(one).tobytes())
    return digest.hexdigest()
