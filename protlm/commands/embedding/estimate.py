"""`protlm embed --dry-run`: what a command will need, measured on a few batches."""

import os
import shutil
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch

from protlm.commands.embedding.job import Job
from protlm.data.vocabulary import STANDARD
from protlm.model.pretrained import PretrainedModel
from protlm.terminal import printable

# Lengths of the random sequences that are measured, in residues.
_LENGTHS = (128, 512, 1_024, 2_048)
_STATUS, _MEMORY, _RESET = (
    Path("/proc/self/status"),
    Path("/proc/meminfo"),
    Path("/proc/self/clear_refs"),
)
_LISTED = 10
# A value per token that grows less, from the shortest to the longest, is noise.
_GROWS = 1.5


def print_estimate(job: Job, output: Path) -> None:
    """Prints records, time, memory and bytes, and the proteins that will not fit."""
    lengths, plan = job.plan.lengths, job.plan
    distinct = np.concatenate([*plan.units, np.zeros(0, np.int64)]).astype(np.int64)
    folder = output.absolute().parent
    while not folder.exists():
        folder = folder.parent
    values, unfinished = int(plan.num_bytes.sum()), int(plan.num_bytes[distinct].sum())
    rows = [
        ("records", f"{job.proteins.num_records:,}, of them {len(lengths):,} to embed"),
        ("distinct sequences", f"{len(distinct):,}"),
        ("residues", f"{int(lengths[distinct].sum()):,}"),
        ("longest", f"{int(lengths.max(initial=0)):,} residues"),
        ("padding", f"{plan.padding():.1%} of the positions"),
        ("output", f"{_size(values)}, and {_size(unfinished)} until it is complete"),
        ("free disk space", _size(shutil.disk_usage(folder).free)),
    ]
    if len(distinct):
        rows += _measured(job)
    for name, text in rows:
        print(f"{name:20}{text}")
    job.proteins.report("to embed")


def _measured(job: Job) -> list[tuple[str, str]]:
    """Returns the time and the memory, extrapolated from batches of random proteins."""
    limit = job.model.max_residues or _LENGTHS[-1]
    sizes = sorted({min(length, limit) for length in _LENGTHS})
    seconds, memory = _per_token(job, sizes)
    tokens, largest = [], []
    for unit in range(len(job.plan.units)):
        for batch in job.plan.batches(unit):
            longest = int(job.plan.lengths[batch.records].max())
            tokens.append(len(batch.records) * (longest + 2))
            largest.append(longest if job.model.max_residues is None else min(longest, limit))
    total = float(np.sum(np.polyval(seconds, largest) * tokens))
    in_one_pass = job.plan.lengths
    if job.model.max_residues is not None:
        in_one_pass = np.minimum(in_one_pass, limit)
    needs = np.polyval(memory, in_one_pass) * (in_one_pass + 2)
    free = free_memory(job.model.device)
    return [
        ("time", f"about {timedelta(seconds=round(total))} on {job.model.device}"),
        ("memory", f"about {_size(needs.max())} for the longest, {_size(free)} are free"),
        *_too_large(job, needs, free),
    ]


def _too_large(job: Job, needs: np.ndarray, free: int) -> list[tuple[str, str]]:
    numbers = np.flatnonzero(needs > free).tolist()
    listed = set(numbers[:_LISTED])
    rows = [
        f"{record.identifier}, {len(record.sequence):,} residues: about {_size(needs[number])}"
        for number, record in (job.records() if listed else ())
        if number in listed
    ]
    if len(numbers) > _LISTED:
        rows.append(f"{len(numbers) - _LISTED:,} more proteins")
    return [("will not fit", printable(row)) for row in rows]


def _per_token(job: Job, sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the seconds and the bytes of a token, each as a line over the length."""
    embedder, rng = job.embedder, np.random.default_rng(0)
    seconds, memory, before = [], [], None
    for length in sizes:
        rows = max(1, job.options.tokens_per_batch // (length + 2))
        some = ["".join(rng.choice(list(STANDARD), length)) for _ in range(rows)]
        embedder.vectors(some[:1])
        used = _restart_peak(job.model)
        before = used if before is None else before
        embedder.vectors(some)
        memory.append(max(0, _peak(job.model) - before) / (rows * (length + 2)))
        start = time.perf_counter()
        embedder.vectors(some)
        seconds.append((time.perf_counter() - start) / (rows * (length + 2)))
    return _line(sizes, seconds), _line(sizes, memory)


def _line(sizes: list[int], values: list[float]) -> np.ndarray:
    """Returns slope and start of a line through values that grow at most linearly.

    Values that hardly grow are taken as constant: the slope is used far beyond the last size.
    """
    if len(sizes) == 1 or values[-1] < _GROWS * min(values):
        return np.array([0.0, float(np.median(values))])
    slope = (values[-1] - values[0]) / (sizes[-1] - sizes[0])
    return np.array([slope, max(values[-1] - slope * sizes[-1], 0.0)])


def _restart_peak(model: PretrainedModel) -> int:
    """Sets the peak of the used memory back, and returns the memory in use, in bytes."""
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
        return torch.cuda.memory_allocated(model.device)
    try:
        _RESET.write_text("5")
    except OSError:
        return 0
    return _kilobytes(_STATUS, "VmRSS:") * 1_024


def _peak(model: PretrainedModel) -> int:
    if model.device.type == "cuda":
        return torch.cuda.max_memory_allocated(model.device)
    return _kilobytes(_STATUS, "VmHWM:") * 1_024


def free_memory(device: torch.device) -> int:
    """Returns the free memory of a device, or of the machine, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if _MEMORY.exists():
        return _kilobytes(_MEMORY, "MemAvailable:") * 1_024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _kilobytes(path: Path, name: str) -> int:
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)


def _size(num_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes:.0f} bytes"
