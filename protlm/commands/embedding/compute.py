"""The computation of a share of the vectors, batch by batch."""

import sys
from collections.abc import Iterator

import numpy as np
import torch

from protlm.commands.embedding.job import Job
from protlm.commands.embedding.options import Dtype, Share
from protlm.commands.embedding.parts import NO_MEMORY, PRESENT, Parts
from protlm.data.records import Record
from protlm.model.embedding import Embedder, Vectors
from protlm.system.errors import UserError
from protlm.system.terminal import JobProgress, printable


def compute(job: Job, parts: Parts, share: Share, *, quiet: bool = False) -> int:
    """Computes the batches of a share that are not finished; returns how many were halved.

    Those with a protein that did not fit into the memory are computed again: it may fit now.
    """
    embedder, lengths = job.embedder, job.plan.lengths
    mine = {unit: finished(parts, unit) for unit in range(len(job.plan.units)) if unit in share}
    if kept := sum(map(len, mine.values())):
        part = "" if share.count == 1 else f" of share {share.number} of {share.count}"
        message = f"continuing {parts.folder}: {kept:,} batches{part} are finished"
        print(printable(message), file=sys.stderr)
    total = sum(int(lengths[job.plan.units[unit]].sum()) for unit in mine)
    done = sum(
        int(lengths[batch.records].sum())
        for unit, indices in mine.items()
        for index, batch in enumerate(job.plan.batches(unit))
        if index in indices
    )
    with JobProgress("residues embedded", total, done=done, quiet=quiet) as progress:
        for unit, records in _units(job):
            if unit not in mine:
                continue
            for index, batch in enumerate(job.plan.batches(unit)):
                if index not in mine[unit]:
                    some = [records[number] for number in batch.records]
                    parts.write(unit, batch, *_batch(job, embedder, some))
                    done += int(lengths[batch.records].sum())
                    progress.update(done)
    return embedder.num_halved


def finished(parts: Parts, unit: int) -> set[int]:
    """Returns the indices of the batches of a unit that are not computed again."""
    found = parts.finished(unit)
    return {index for index, statuses in found.items() if NO_MEMORY not in statuses}


def _units(job: Job) -> Iterator[tuple[int, dict[int, Record]]]:
    """Yields each unit with its records by number."""
    units = iter(enumerate(job.plan.units))
    unit, records = -1, np.zeros(0, np.int64)
    found: dict[int, Record] = {}
    for number, record in job.records():
        if job.plan.first[number] != number:
            continue
        if not found:
            unit, records = next(units)
        found[number] = record
        if len(found) == len(records):
            yield unit, found
            found = {}


def _batch(job: Job, embedder: Embedder, records: list[Record]) -> tuple[list[int], list[bytes]]:
    """Returns the status and the bytes of the vectors of each record."""
    sequences = [record.sequence for record in records]
    computed = embedder.vectors(sequences, [job.ranges_of(record) for record in records])
    statuses, contents = [], []
    for record, vectors in zip(records, computed, strict=True):
        if vectors is not None:
            embedder.check_finite(vectors, printable(record.identifier))
        statuses.append(NO_MEMORY if vectors is None else PRESENT)
        contents.append(_encode(job, record, vectors))
    return statuses, contents


def _encode(job: Job, record: Record, vectors: Vectors | None) -> bytes:
    dtype = job.options.dtype
    if vectors is None:
        rows = sum(job.rows(kind, record) for kind, _ in job.keys)
        return bytes(rows * job.width * dtype.stored.itemsize)
    contents = []
    for key in job.keys:
        narrow = vectors[key].to(dtype.torch)
        if dtype is Dtype.float16 and narrow.isinf().any():
            raise UserError(
                printable(
                    f"the vectors of {record.identifier} have numbers that are too large for "
                    "float16; type --dtype float32"
                )
            )
        bits = narrow.view(torch.int16) if dtype is Dtype.bfloat16 else narrow
        contents.append(bits.contiguous().numpy().tobytes())
    return b"".join(contents)
