"""`protlm embed --dry-run`: what a command will need, measured on a few batches."""

from collections.abc import Set
from datetime import timedelta

from protlm.analysis.pace import token_seconds
from protlm.commands.embedding.job import Job
from protlm.system.memory import free_memory, readable_size


def print_estimate(job: Job, free: int, finished: Set[int]) -> None:
    """Prints records, time, memory and bytes; finished blocks take no more time."""
    lengths, plan = job.plan.lengths, job.plan
    values, unfinished = int(plan.num_bytes.sum()), int(plan.num_bytes[plan.distinct].sum())
    rows = [
        ("records", f"{job.inputs.proteins.num_records:,}, of them {len(lengths):,} to embed"),
        ("distinct sequences", f"{len(plan.distinct):,}"),
        ("residues", f"{int(lengths[plan.distinct].sum()):,}"),
        ("longest", f"{int(lengths.max(initial=0)):,} residues"),
        ("padding", f"{plan.padding():.1%} of the positions"),
        (
            "output",
            f"{readable_size(values)}, and {readable_size(unfinished)} until it is complete",
        ),
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
            total += len(batch) * (longest + job.model.vocabulary.num_around) * seconds(longest)
            most = max(most, len(batch) * room.needs(longest))
    free = free_memory(job.model.device)
    rows = [
        ("time", f"about {timedelta(seconds=round(total))} on {job.model.device}"),
        (
            "memory",
            f"about {readable_size(most)} for the largest batch, {readable_size(free)} are free",
        ),
    ]
    lengths = job.plan.lengths[job.plan.num_bytes > 0].tolist()
    fits = {length: room.needs(length) <= free for length in set(lengths)}
    if large := [length for length in lengths if not fits[length]]:
        which = f"{len(large):,} of {len(lengths):,} proteins, of {min(large):,} residues and more"
        rows.append(("will not fit", which))
    return rows
