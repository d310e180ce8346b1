"""`protlm doctor [FASTA] [-m MODEL]`: what works on this machine, and what would fail."""

import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from protlm import __version__
from protlm.attention.layers import attention_label
from protlm.checkpoints.format import announced_default
from protlm.data.records.proteins import Proteins
from protlm.loading import load_model, pick_device
from protlm.model.memory import Room
from protlm.model.pretrained import PretrainedModel
from protlm.model.transformer import num_parameters
from protlm.options.shared import Duplicates
from protlm.system.errors import ExitCode, UserError
from protlm.system.memory import available_memory, readable_size
from protlm.system.terminal import console

_PACKAGES = ("torch", "pytorch-lightning", "numpy", "h5py", "scikit-learn", "safetensors")
_LEAST_DISK = 1e9


@dataclass
class Report:
    """Facts by topic, notes on what is unusual, and problems: what would fail."""

    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def doctor(
    fasta: Path | None, model_path: Path | None, *, device: str = "auto", as_json: bool = False
) -> None:
    """Prints the facts of this machine, of a model and of an input, and what would fail.

    Exits with 3 if something would fail. A sequence file needs a model.
    """
    report = Report()
    try:
        chosen = pick_device(device)
    except UserError as error:
        report.problems.append(str(error))
        chosen = torch.device("cpu")
    _check_machine(report, chosen)
    if fasta is not None and model_path is None:
        model_path = announced_default("-m MODEL")
    model = None if model_path is None else _check_model(report, model_path, chosen)
    if model is not None and fasta is not None:
        _check_input(report, fasta, model)
    if as_json:
        print(json.dumps(asdict(report), indent=2))
    else:
        _print(report)
    if report.problems:
        sys.exit(ExitCode.BAD_INPUT)


def _check_machine(report: Report, device: torch.device) -> None:
    has_affinity = hasattr(os, "sched_getaffinity")
    folders = (Path.cwd(), Path(tempfile.gettempdir()))
    report.facts = {
        "versions": {
            "protlm": __version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in _PACKAGES},
        },
        "device": str(device),
        "gpus": [_gpu(number) for number in range(torch.cuda.device_count())],
        "processors": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "available_memory_bytes": available_memory(),
        "disks": {str(folder): _disk(folder) for folder in folders},
        "fused_kernels": _fused_kernels(device),
    }
    threads, processors = report.facts["threads"], report.facts["processors"]
    if threads > processors:
        report.notes.append(
            f"torch uses {threads} threads on {processors} processors; type: export "
            f"OMP_NUM_THREADS={processors}"
        )
    if (encoding := sys.getfilesystemencoding()) != "utf-8":
        report.problems.append(f"file names are encoded in {encoding}; type: export LC_ALL=C.UTF-8")
    for folder, disk in report.facts["disks"].items():
        if not disk["writable"]:
            report.problems.append(f"{folder} is not writable; work in another folder")
        elif disk["free_bytes"] < _LEAST_DISK:
            report.problems.append(
                f"{folder} has {readable_size(disk['free_bytes'])} left; free some space"
            )


def _gpu(number: int) -> dict[str, str | int]:
    free, total = torch.cuda.mem_get_info(number)
    return {
        "name": torch.cuda.get_device_name(number),
        "total_bytes": total,
        "free_bytes": free,
    }


def _fused_kernels(device: torch.device) -> list[str] | str:
    """Returns what their checks found on this device, with its present driver and versions."""
    if importlib.util.find_spec("triton") is None:
        return "not used, as the package triton is missing"
    from protlm.attention.linearized.fused.check import kept_verdicts

    found = [f"{one.case}: {one.fault or 'right'}" for one in kept_verdicts(device)]
    return found or "checked when a GPU first needs them"


def _disk(folder: Path) -> dict[str, int | bool]:
    return {
        "free_bytes": shutil.disk_usage(folder).free,
        "writable": os.access(folder, os.W_OK),
    }


def _check_model(report: Report, path: Path, device: torch.device) -> PretrainedModel | None:
    try:
        model = load_model(path, device=str(device))
    except UserError as error:
        report.problems.append(str(error))
        return None
    described = model.description
    report.facts["model"] = {
        "path": str(path),
        "hash": model.hash,
        "parameters": num_parameters(model.network),
        "attention": attention_label(described.attention_config),
        "objective": described.objective.value,
        "layers": model.num_layers,
        "max_residues": model.max_residues,
        "trained_on_residues": described.max_length - model.vocabulary.num_around,
    }
    return model


def _check_input(report: Report, path: Path, model: PretrainedModel) -> None:
    try:
        proteins = Proteins(path, max_residues=model.max_residues, duplicates=Duplicates.suffix)
    except UserError as error:
        report.problems.append(str(error))
        return
    longest = max(proteins.lengths)
    room = Room(model, short=0)
    report.facts["input"] = {
        "records": proteins.num_records,
        "usable": len(proteins),
        "residues": sum(proteins.lengths),
        "longest": longest,
        "bytes_for_longest": room.needs(longest),
    }
    report.problems += _faults(path, proteins)
    trained_on = report.facts["model"]["trained_on_residues"]
    if longer := sum(length > trained_on for length in proteins.lengths):
        report.notes.append(
            f"{longer:,} proteins are longer than the {trained_on:,} residues of the training; "
            "they are read whole, but the model has not seen such lengths"
        )
    if refusal := room.refusal(longest):
        report.problems.append(
            f"the longest protein: {refusal}; leave it out, or use another device"
        )


def _faults(path: Path, proteins: Proteins) -> Iterator[str]:
    for reason, number in proteins.tally.rejected.items():
        yield f"rejected records of {path}: {number:,}, {reason}"
    if proteins.skipped:
        identifier, reason = proteins.skipped[0]
        yield (
            f"proteins that are too long for the model, and skipped: {len(proteins.skipped):,}, "
            f"for instance {identifier}: {reason}"
        )
    if proteins.renamed:
        yield (
            f"repeated identifiers of {path}: {len(proteins.renamed):,}; type --duplicates first "
            "or --duplicates suffix"
        )


def _print(report: Report) -> None:
    lines = [
        *(f"{_label(topic)}: {_text(topic, fact)}" for topic, fact in report.facts.items()),
        *(f"note: {note}" for note in report.notes),
        *([f"problem: {problem}" for problem in report.problems] or ["no problems"]),
    ]
    out = console()
    for line in lines:
        out.print(line, highlight=False, markup=False)


def _label(name: str) -> str:
    # Folders are names as well.
    return name if "/" in name else name.removesuffix("_bytes").replace("_", " ")


def _text(name: str, fact: Any) -> str:
    if isinstance(fact, dict):
        return ", ".join(f"{_label(key)} {_text(key, one)}" for key, one in fact.items())
    if isinstance(fact, list):
        return "; ".join(_text(name, one) for one in fact) or "none"
    if fact is None:
        return "unlimited" if name.startswith("max") else "unknown"
    if isinstance(fact, bool):
        return "yes" if fact else "no"
    if "bytes" in name:
        return readable_size(fact)
    return f"{fact:,}" if isinstance(fact, int) else str(fact)
