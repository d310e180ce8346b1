"""`protlm embed --dry-run`: what a command will need, measured on a few batches."""

import os
import shutil
import time
from collections.abc import Mapping, Set
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch

from protlm.commands.embedding.job import Job
from protlm.data.vocabulary import STANDARD
from protlm.model.pretrained import PretrainedModel
from protlm.terminal import printable

# Lengths of the random proteins in batches that are timed, and of those whose memory is measured.
_LENGTHS, _ALONE = (128, 512, 1_024, 2_048), (2_048, 4_096)
# Twice the length takes at most twice the memory if it grows linearly, up to four times if not.
_SQUARE = 2.6
_STATUS, _MEMORY, _RESET = (
    Path("/proc/self/status"),
    Path("/proc/meminfo"),
    Path("/proc/self/clear_refs"),
)
_LISTED = 10
# A value per token that grows less, from the shortest to the longest, is noise.
_GROWS = 1.5


def print_estimate(job: Job, output: Path, finished: Mapping[int, Set[int]]) -> None:
    """Prints records, time, memory and bytes, and the proteins that will not fit.

    Args:
        job: the proteins.
        output: the output.
        finished: for each unit the indices of its finished batches, which take no more time.
    """
    lengths, plan = job.plan.lengths, job.plan
    distinct = np.concatenate([*plan.units, np.zeros(0, np.int64)]).astype(np.int64)
    folder = output.absolute().parent
    while not folder.exists():
        folder = folder.parent
    values, unfinished = int(plan.num_bytes.sum()), int(plan.num_bytes[distinct].sum())
    sizes = f"{readable_size(values)}, and {readable_size(unfinished)} until it is complete"
    rows = [
        ("records", f"{job.proteins.num_records:,}, of them {len(lengths):,} to embed"),
        ("distinct sequences", f"{len(distinct):,}"),
        ("residues", f"{int(lengths[distinct].sum()):,}"),
        ("longest", f"{int(lengths.max(initial=0)):,} residues"),
        ("padding", f"{plan.padding():.1%} of the positions"),
        ("output", sizes),
        ("free disk space", readable_size(shutil.disk_usage(folder).free)),
    ]
    if num_finished := sum(map(len, finished.values())):
        num_batches = sum(len(plan.batches(unit)) for unit in range(len(plan.units)))
        rows.append(("finished", f"{num_finished:,} of {num_batches:,} batches"))
    if len(distinct):
        rows += _measured(job, finished)
    for name, text in rows:
        print(f"{name:20}{text}")
    job.proteins.report("to embed")


def _measured(job: Job, finished: Mapping[int, Set[int]]) -> list[tuple[str, str]]:
    """Returns the time and the memory, extrapolated from batches of random proteins."""
    limit = job.model.max_residues
    seconds, peak = _of_batches(job, _capped(_LENGTHS, limit))
    tokens, largest = [], []
    for unit in range(len(job.plan.units)):
        for index, batch in enumerate(job.plan.batches(unit)):
            if index in finished.get(unit, ()):
                continue
            longest = int(job.plan.lengths[batch.records].max())
            tokens.append(len(batch.records) * (longest + 2))
            largest.append(longest if limit is None else min(longest, limit))
    total = float(np.sum(np.polyval(seconds, largest) * tokens))
    alone = _capped(_ALONE, limit)
    peaks = [_pass(job, ["A" * length])[1] for length in alone]
    in_one_pass = job.plan.lengths if limit is None else np.minimum(job.plan.lengths, limit)
    needs = np.maximum(extrapolated(alone, peaks, in_one_pass), peak)
    free = free_memory(job.model.device)
    memory = f"about {readable_size(needs.max())} for the longest, {readable_size(free)} are free"
    return [
        ("time", f"about {timedelta(seconds=round(total))} on {job.model.device}"),
        ("memory", memory),
        *_too_large(job, needs, free),
    ]


def extrapolated(sizes: list[int], peaks: list[int], lengths: np.ndarray) -> np.ndarray:
    """Returns the memory of proteins of any length, from those of one or two lengths.

    It grows as the length, or as its square if that is how it grows between the two; up to the
    last of them it is constant, which is more than is needed.
    """
    is_square = len(peaks) > 1 and peaks[-1] > _SQUARE * peaks[-2]
    growth = np.maximum(lengths / sizes[-1], 1.0) ** (2 if is_square else 1)
    return peaks[-1] * growth


def _too_large(job: Job, needs: np.ndarray, free: int) -> list[tuple[str, str]]:
    numbers = np.flatnonzero(needs > free).tolist()
    listed = set(numbers[:_LISTED])
    rows = [
        f"{record.identifier}, {len(record.sequence):,} residues: "
        f"about {readable_size(needs[number])}"
        for number, record in (job.records() if listed else ())
        if number in listed
    ]
    if len(numbers) > _LISTED:
        rows.append(f"{len(numbers) - _LISTED:,} more proteins")
    return [("will not fit", printable(row)) for row in rows]


def _of_batches(job: Job, sizes: list[int]) -> tuple[np.ndarray, int]:
    """Returns the seconds of a token, as a line over the length, and the peak of the memory."""
    rng, seconds, peaks = np.random.default_rng(0), [], []
    for length in sizes:
        rows = max(1, job.options.tokens_per_batch // (length + 2))
        some = ["".join(rng.choice(list(STANDARD), length)) for _ in range(rows)]
        # The first pass also fills the caches of the libraries.
        peaks.append(_pass(job, some)[1])
        seconds.append(_pass(job, some)[0] / (rows * (length + 2)))
    return _line(sizes, seconds), max(peaks)


def _pass(job: Job, sequences: list[str]) -> tuple[float, int]:
    """Returns the seconds and the bytes of a batch."""
    before, start = _restart_peak(job.model), time.perf_counter()
    job.embedder.vectors(sequences)
    return time.perf_counter() - start, max(0, _peak(job.model) - before)


def _capped(lengths: tuple[int, ...], limit: int | None) -> list[int]:
    return sorted({min(length, limit or length) for length in lengths})


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


def readable_size(num_bytes: float) -> str:
    """Returns a number of bytes in the largest unit that it fills.

    >>> readable_size(1_536)
    '1.5 kB'
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes:.0f} bytes"
