"""The computation of a share of the vectors, part by part."""

import sys
from collections.abc import Iterator

import torch

from protlm.commands.embedding.job import Job
from protlm.commands.embedding.options import Dtype
from protlm.commands.embedding.parts import NO_MEMORY, Parts
from protlm.data.records import Record
from protlm.model.embedding import Embedder, Vectors
from protlm.system.errors import UserError
from protlm.system.shares import Share
from protlm.system.terminal import JobProgress, printable


def compute(job: Job, parts: Parts, share: Share, *, quiet: bool = False) -> int:
    """Computes the parts of a share that are not finished; returns how many batches were halved.

    Those with a protein that did not fit into the memory are computed again: it may fit now.
    """
    plan, embedder = job.plan, job.embedder
    mine = [part for part in plan.parts if part.number in share]
    finished = [part for part in mine if parts.too_large(part) == set()]
    if kept := sum(len(part.batches) for part in finished):
        of_share = "" if share.count == 1 else f" of share {share.number} of {share.count}"
        message = f"continuing {parts.folder}: {kept:,} batches{of_share} are finished"
        print(printable(message), file=sys.stderr)
    total = sum(plan.residues(part.batches) for part in mine)
    done = sum(plan.residues(part.batches) for part in finished)
    missing = {part.number for part in mine} - {part.number for part in finished}
    with JobProgress("residues embedded", total, done=done, quiet=quiet) as progress:
        for unit, records in job.units():
            for part in (part for part in unit if part.number in missing):
                batches = [[records[number] for number in batch] for batch in part.batches]
                parts.write(part, _contents(job, embedder, batches, progress))
    return embedder.num_halved


def _contents(
    job: Job, embedder: Embedder, batches: list[list[Record]], progress: JobProgress
) -> Iterator[bytes]:
    """Yields the bytes of the vectors of each record."""
    for records in batches:
        sequences = [record.sequence for record in records]
        computed = embedder.vectors(sequences, [job.ranges_of(record) for record in records])
        for record, vectors in zip(records, computed, strict=True):
            if vectors is None:
                yield NO_MEMORY * job.num_bytes(record)
            else:
                embedder.check_finite(vectors, printable(record.identifier))
                yield _encode(job, record, vectors)
        progress.advance(sum(map(len, sequences)))


def _encode(job: Job, record: Record, vectors: Vectors) -> bytes:
    dtype = job.options.dtype
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
