"""`protlm embed --dry-run`: what a command will need, measured on a few batches."""

import time
from collections.abc import Callable, Set
from datetime import timedelta

import numpy as np

from protlm.commands.embedding.job import Job
from protlm.data.vocabulary import STANDARD
from protlm.model.embedding import Embedder
from protlm.system.memory import free_memory, readable_size

# Lengths of the random proteins in batches that are timed.
_LENGTHS = (128, 512, 1_024, 2_048)
# Time per token must grow by this factor, from the shortest to the longest, to count as growth;
# less is noise.
_GROWS = 1.5


def print_estimate(job: Job, free: int, finished: Set[int]) -> None:
    """Prints records, time, memory and bytes; finished blocks take no more time."""
    lengths, plan = job.plan.lengths, job.plan
    values, unfinished = int(plan.num_bytes.sum()), int(plan.num_bytes[plan.distinct].sum())
    sizes = f"{readable_size(values)}, and {readable_size(unfinished)} until it is complete"
    rows = [
        ("records", f"{job.inputs.proteins.num_records:,}, of them {len(lengths):,} to embed"),
        ("distinct sequences", f"{len(plan.distinct):,}"),
        ("residues", f"{int(lengths[plan.distinct].sum()):,}"),
        ("longest", f"{int(lengths.max(initial=0)):,} residues"),
        ("padding", f"{plan.padding():.1%} of the positions"),
        ("output", sizes),
        ("free disk space", readable_size(free)),
    ]
    num_batches = [len(block.batches) for block in plan.blocks]
    if finished:
        num_finished = sum(num_batches[number] for number in finished)
        rows.append(("finished", f"{num_finished:,} of {sum(num_batches):,} batches"))
    for name, text in [*rows, *_measured(job, finished)]:
        print(f"{name:20}{text}")
    job.inputs.proteins.report("to embed")


def _measured(job: Job, finished: Set[int]) -> list[tuple[str, str]]:
    """Returns the time and the memory, extrapolated from batches of random proteins."""
    room, seconds = job.embedder.room, token_seconds(job.embedder, job.options.tokens_per_batch)
    total, most = 0.0, 0
    for block in job.plan.blocks:
        for batch in block.batches if block.number not in finished else ():
            longest = int(job.plan.lengths[batch].max())
            tokens = len(batch) * (longest + job.model.vocabulary.num_around)
            total += tokens * seconds(longest)
            most = max(most, len(batch) * room.needs(longest))
    free = free_memory(job.model.device)
    memory = f"about {readable_size(most)} for the largest batch, {readable_size(free)} are free"
    rows = [
        ("time", f"about {timedelta(seconds=round(total))} on {job.model.device}"),
        ("memory", memory),
    ]
    lengths = job.plan.lengths[job.plan.num_bytes > 0].tolist()
    fits = {length: room.needs(length) <= free for length in set(lengths)}
    if large := [length for length in lengths if not fits[length]]:
        which = f"{len(large):,} of {len(lengths):,} proteins, of {min(large):,} residues and more"
        rows.append(("will not fit", which))
    return rows


def token_seconds(embedder: Embedder, tokens_per_batch: int) -> Callable[[int], float]:
    """Returns a function from the length of a protein to the seconds of a token, a line."""
    limit, around = embedder.model.max_residues, embedder.model.vocabulary.num_around
    sizes = sorted({min(n, limit or n) for n in _LENGTHS})
    rng, seconds = np.random.default_rng(0), []
    for length in sizes:
        rows = max(1, tokens_per_batch // (length + around))
        sequences = ["".join(rng.choice(list(STANDARD), length)) for _ in range(rows)]
        # The first pass also fills the caches of the libraries.
        _pass(embedder, sequences)
        seconds.append(_pass(embedder, sequences) / (rows * (length + around)))
    line = _line(sizes, seconds)
    return lambda length: float(np.polyval(line, min(length, limit or length)))


def _pass(embedder: Embedder, sequences: list[str]) -> float:
    start = time.perf_counter()
    embedder.vectors(sequences)
    return time.perf_counter() - start


def _line(sizes: list[int], values: list[float]) -> np.ndarray:
    """Returns slope and start of a line through values, constant if they hardly grow.

    The slope is used far beyond the last size.
    """
    if len(sizes) == 1 or values[-1] < _GROWS * values[0]:
        return np.array([0.0, float(np.median(values))])
    slope = (values[-1] - values[0]) / (sizes[-1] - sizes[0])
    return np.array([slope, max(values[-1] - slope * sizes[-1], 0.0)])
