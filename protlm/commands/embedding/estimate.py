"""`protlm embed --dry-run`: what a command will need, measured on a few batches."""

import shutil
import time
from collections.abc import Mapping, Set
from datetime import timedelta
from pathlib import Path

import numpy as np

from protlm.commands.embedding.job import Job
from protlm.data.vocabulary import STANDARD
from protlm.system.memory import free_memory, readable_size
from protlm.system.terminal import printable

# Lengths of the random proteins in batches that are timed.
_LENGTHS = (128, 512, 1_024, 2_048)
_LISTED = 10
# Memory or time per token grows if the longest takes this factor more than the shortest; less is
# noise.
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
    limit, room = job.model.max_residues, job.embedder.room
    seconds = _of_batches(job, _capped(_LENGTHS, limit))
    tokens, largest, of_batches = [], [], [0]
    for unit in range(len(job.plan.units)):
        for index, batch in enumerate(job.plan.batches(unit)):
            if index in finished.get(unit, ()):
                continue
            longest = int(job.plan.lengths[batch.records].max())
            tokens.append(len(batch.records) * (longest + 2))
            largest.append(longest if limit is None else min(longest, limit))
            of_batches.append(len(batch.records) * room.needs(longest))
    total = float(np.sum(np.polyval(seconds, largest) * tokens))
    distinct, places = np.unique(job.plan.lengths, return_inverse=True)
    needs = [room.needs(length) for length in distinct.tolist()]
    free = free_memory(job.model.device)
    needed = readable_size(max(of_batches))
    memory = f"about {needed} for the largest batch, {readable_size(free)} are free"
    return [
        ("time", f"about {timedelta(seconds=round(total))} on {job.model.device}"),
        ("memory", memory),
        *_too_large(job, np.array(needs)[places], free),
    ]


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


def _of_batches(job: Job, sizes: list[int]) -> np.ndarray:
    """Returns the seconds of a token, as a line over the length."""
    rng, seconds = np.random.default_rng(0), []
    for length in sizes:
        rows = max(1, job.options.tokens_per_batch // (length + 2))
        some = ["".join(rng.choice(list(STANDARD), length)) for _ in range(rows)]
        # The first pass also fills the caches of the libraries.
        _pass(job, some)
        seconds.append(_pass(job, some) / (rows * (length + 2)))
    return _line(sizes, seconds)


def _pass(job: Job, sequences: list[str]) -> float:
    """Returns the seconds of a batch."""
    start = time.perf_counter()
    job.embedder.vectors(sequences)
    return time.perf_counter() - start


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
