"""`protlm doctor [FASTA] [-m MODEL]`: what works on this machine, and what would fail."""

import json
import math
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from protlm import __version__
from protlm.data.batching.plan import SPECIALS
from protlm.data.records.proteins import Duplicates, Proteins
from protlm.loading import load_model, pick_device
from protlm.model.memory import Room
from protlm.model.pretrained import PretrainedModel
from protlm.model.transformer import num_parameters
from protlm.system.errors import ExitCode, UserError
from protlm.system.memory import available_memory
from protlm.system.terminal import console

_PACKAGES = ("torch", "pytorch-lightning", "numpy", "h5py", "scikit-learn", "safetensors")
_LEAST_DISK = 1e9
# Sizes of the matrices whose products are timed, and seconds for each type.
_SIZE, _SECONDS = 512, 0.25
# bfloat16 is reported as slow below this fraction of the speed of float32.
_SLOW = 0.8
_GB = 1e9


@dataclass
class Report:
    """Facts by topic, notes on what could be faster, and problems: what would fail."""

    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def doctor(
    fasta: Path | None, model_path: Path | None, *, device: str = "auto", as_json: bool = False
) -> None:
    """Prints the facts of this machine, of a model and of an input, and what would fail.

    Exits with 3 if something would fail.

    Args:
        fasta: a sequence file, for which a model is needed.
        model_path: a run, a checkpoint or an exported model.
        device: as for `protlm.loading.pick_device`.
        as_json: prints JSON.
    """
    report = Report()
    try:
        chosen = pick_device(device)
    except UserError as error:
        report.problems.append(str(error))
        chosen = torch.device("cpu")
    _check_machine(report, chosen)
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
    facts, variable = report.facts, "OMP_NUM_THREADS"
    facts["versions"] = _versions()
    facts["device"] = str(device)
    facts["gpus"] = _gpus()
    facts["processors"] = _processors()
    threads = {"torch": torch.get_num_threads(), variable: os.environ.get(variable, "unset")}
    facts["threads"] = threads
    facts["available_memory_bytes"] = available_memory()
    facts["disks"] = _disks()
    facts["encodings"] = _encodings()
    speeds = _gflops(device)
    facts["gflops"] = {name: round(speed, 1) for name, speed in speeds.items()}
    if speeds["bfloat16"] < _SLOW * speeds["float32"]:
        factor = speeds["float32"] / speeds["bfloat16"]
        report.notes.append(
            f"bfloat16 products are {factor:.1f} times slower than float32 on this device; keep "
            "trainer.precision=auto or 32-true"
        )
    if threads["torch"] > facts["processors"]:
        report.notes.append(
            f"torch uses {threads['torch']} threads on {facts['processors']} processors; "
            f"type: export OMP_NUM_THREADS={facts['processors']}"
        )
    for folder, disk in facts["disks"].items():
        if not disk["writable"]:
            report.problems.append(f"{folder} is not writable; work in another folder")
        elif disk["free_bytes"] < _LEAST_DISK:
            report.problems.append(
                f"{folder} has {disk['free_bytes'] / _GB:.2f} GB left; free some space"
            )
    if facts["encodings"]["file_names"].lower().replace("-", "") != "utf8":
        report.problems.append(
            f"file names are encoded in {facts['encodings']['file_names']}; type: export "
            "LC_ALL=C.UTF-8"
        )


def _versions() -> dict[str, str]:
    found = {"protlm": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def _processors() -> int:
    """Returns the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gpus() -> list[dict[str, str | int]]:
    found = []
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        found.append({"name": name, "total_bytes": total, "free_bytes": free})
    return found


def _disks() -> dict[str, dict[str, int | bool]]:
    """Returns the facts of the disks of this folder and of the temporary one."""
    return {
        str(folder): {
            "free_bytes": shutil.disk_usage(folder).free,
            "writable": os.access(folder, os.W_OK),
        }
        for folder in (Path.cwd(), Path(tempfile.gettempdir()))
    }


def _encodings() -> dict[str, str]:
    output = getattr(sys.stdout, "encoding", None) or "none"
    return {"output": output, "file_names": sys.getfilesystemencoding()}


def _gflops(device: torch.device) -> dict[str, float]:
    """Returns the speed of products of matrices in GFLOP/s by dtype."""
    return {str(dtype)[6:]: _speed(device, dtype) for dtype in (torch.float32, torch.bfloat16)}


def _speed(device: torch.device, dtype: torch.dtype) -> float:
    a, b = (torch.ones(_SIZE, _SIZE, dtype=dtype, device=device) for _ in range(2))
    best, end = math.inf, time.perf_counter() + _SECONDS
    # The first product also loads kernels; the fastest one is disturbed least by other work.
    while time.perf_counter() < end or best == math.inf:
        start = time.perf_counter()
        c = a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
        del c
    return 2 * _SIZE**3 / best / 1e9


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
        "attention": described.attention,
        "objective": described.objective.value,
        "layers": model.num_layers,
        "max_residues": model.max_residues,
        "trained_on_residues": described.max_length - SPECIALS,
    }
    return model


def _check_input(report: Report, path: Path, model: PretrainedModel) -> None:
    try:
        proteins = Proteins(path, max_residues=model.max_residues, duplicates=Duplicates.suffix)
    except UserError as error:
        report.problems.append(str(error))
        return
    longest = max(proteins.lengths)
    facts = {
        "records": proteins.num_records,
        "usable": len(proteins),
        "residues": sum(proteins.lengths),
        "longest": longest,
        "repeated_identifiers": len(proteins.renamed),
        "rejected": dict(proteins.tally.rejected),
        "changed": dict(proteins.tally.changed),
    }
    report.facts["input"] = facts
    report.problems += _faults(path, proteins)
    trained_on = report.facts["model"]["trained_on_residues"]
    if longer := sum(length > trained_on for length in proteins.lengths):
        report.notes.append(
            f"{longer:,} proteins are longer than the {trained_on:,} residues of the training; "
            "they are read whole, but the model has not seen such lengths"
        )
    room = Room(model, short=0)
    facts["bytes_for_longest"] = room.needs(longest)
    if refusal := room.refusal(longest):
        report.problems.append(
            f"the longest protein: {refusal}; leave it out, or use another device"
        )


def _faults(path: Path, proteins: Proteins) -> Iterator[str]:
    for reason, number in proteins.tally.rejected.items():
        yield f"{number:,} records of {path} are rejected: {reason}"
    if proteins.skipped:
        identifier, reason = proteins.skipped[0]
        yield (
            f"{len(proteins.skipped):,} proteins are too long for the model and are skipped, for "
            f"instance {identifier}: {reason}"
        )
    if proteins.renamed:
        yield (
            f"{len(proteins.renamed):,} identifiers of {path} are repeated; type --duplicates "
            "first or --duplicates suffix"
        )


def _print(report: Report) -> None:
    lines = [f"{_label(topic)}: {_text(topic, fact)}" for topic, fact in report.facts.items()]
    lines += [f"note: {note}" for note in report.notes]
    lines += [f"problem: {problem}" for problem in report.problems] or ["no problems"]
    out = console()
    for line in lines:
        out.print(line, highlight=False, markup=False)


def _label(name: str) -> str:
    return name if name.isupper() else name.removesuffix("_bytes").replace("_", " ")


def _text(name: str, fact: Any) -> str:
    """Formats a fact on one line; numbers of bytes in GB."""
    if isinstance(fact, dict):
        return ", ".join(f"{_label(key)} {_text(key, one)}" for key, one in fact.items()) or "none"
    if isinstance(fact, list):
        return "; ".join(_text(name, one) for one in fact) or "none"
    if fact is None:
        return "unlimited" if name.startswith("max") else "unknown"
    if isinstance(fact, bool):
        return "yes" if fact else "no"
    if name.endswith("bytes") or "bytes_for" in name:
        return f"{fact / _GB:.2f} GB"
    return f"{fact:,}" if isinstance(fact, int | float) and not math.isnan(fact) else str(fact)
