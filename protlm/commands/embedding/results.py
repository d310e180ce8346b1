"""Results: blocks, which are computed one by one, and the vectors of all in the order of the input.

`embed` continues from the folder of blocks, `OUT.partial`. A block is a part: the vectors, and in
JSON, with their hash, which records did not fit into the memory. A damaged one is computed again.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from protlm.commands.embedding.job import Job, Key, stored
from protlm.commands.embedding.plan import Block, Plan
from protlm.data.records import Record
from protlm.model.embedding import Vectors, num_windows
from protlm.options.embed import Dtype, Pooling
from protlm.options.jobs import Share
from protlm.system.errors import UserError
from protlm.system.memory import blocks_of
from protlm.system.parts import new_part, read_part
from protlm.system.terminal import JobProgress, printable
from protlm.system.work_folder import Kind, WorkFolder, unfinished, work_folder

EMBEDDING = Kind("embedding", "being computed", "--output")
_TOO_LARGE = "too_large"
# The numbers, and the proteins, that are written at a time.
_BLOCK_VALUES, _BLOCK_PROTEINS = 1 << 24, 1 << 14


class Blocks:
    """The unfinished results of one output."""

    def __init__(self, output: Path, plan: Plan, work: WorkFolder | None = None) -> None:
        self.folder, self._plan, self._work = unfinished(output), plan, work
        self._mapped = lru_cache(maxsize=16)(
            lambda number: np.memmap(self._path(number), np.uint8, "r")
        )
        # By block, of those that this process has written or verified.
        self._too_large: dict[int, set[int]] = {}

    @property
    def work(self) -> WorkFolder:
        """The folder, in which this process may write."""
        assert self._work is not None
        return self._work

    def too_large(self, block: Block) -> set[int] | None:
        """Returns the records that did not fit into the memory; None if the block is unfinished."""
        if block.number not in self._too_large:
            part = read_part(self._path(block.number))
            # An earlier version did not note which records did not fit.
            if (
                part is None
                or _TOO_LARGE not in part.facts
                or len(part.content) != self._plan.bytes_of(block)
            ):
                return None
            self._too_large[block.number] = {*part.facts[_TOO_LARGE]}
        return self._too_large[block.number]

    def write(self, block: Block, vectors: Iterable[tuple[int, bytes | None]]) -> None:
        """Stores the vectors of all records of a block, in the order of its batches.

        A record that did not fit into the memory has None, and zeros in the file.
        """
        too_large: list[int] = []
        with (
            new_part(
                self._path(block.number), {_TOO_LARGE: too_large}, check=self.work.lock.check
            ) as temporary,
            temporary.open("wb") as file,
        ):
            for record, content in vectors:
                if content is None:
                    too_large.append(record)
                    file.write(bytes(self._plan.num_bytes[record]))
                else:
                    file.write(content)
        self._too_large[block.number] = {*too_large}
        self._mapped.cache_clear()

    def read(self, record: int) -> memoryview:
        """Returns the bytes of the vectors of a record, whose block was found to be finished."""
        block, place = self._plan.place(record)
        return self._mapped(block)[place].data

    def missing_bytes(self, share: Share) -> int:
        """Returns the bytes of the vectors of a share that are not on the disk yet.

        A damaged block, which is replaced, may be shorter than it was.
        """
        sizes = {path: path.stat().st_size for path in self.folder.glob("*") if path.is_file()}
        return sum(
            max(0, self._plan.bytes_of(block) - sizes.get(self._path(block.number), 0))
            for block in self._plan.blocks
            if block.number in share
        )

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.vectors"


@contextmanager
def opened(
    job: Job, output: Path, begun_with: Mapping[str, Any], *, quiet: bool = False
) -> Iterator[Blocks]:
    """Yields the unfinished results of an output, while this process owns a share of them."""
    share, break_lock = job.options.share, job.options.break_lock
    name = "" if share is None else f"share-{share.number}-of-{share.count}"
    with work_folder(
        unfinished(output), begun_with, EMBEDDING, break_lock=break_lock, share=name
    ) as work:
        work.is_quiet = quiet
        yield Blocks(output, job.plan, work)


def compute(job: Job, blocks: Blocks, share: Share, *, quiet: bool = False) -> int:
    """Computes the blocks of a share that are not finished; returns how many batches were halved.

    Those with a protein that did not fit into the memory are computed again: it may fit now.
    """
    plan = job.plan
    mine = [block for block in plan.blocks if block.number in share]
    finished = [block for block in mine if blocks.too_large(block) == set()]
    if kept := sum(len(block.batches) for block in finished):
        of_share = "" if share.count == 1 else f" of share {share.number} of {share.count}"
        print(
            printable(f"continuing {blocks.folder}: {kept:,} batches{of_share} are finished"),
            file=sys.stderr,
        )
    total = sum(plan.residues(block.batches) for block in mine)
    done = sum(plan.residues(block.batches) for block in finished)
    missing = {block.number for block in mine} - {block.number for block in finished}
    with JobProgress("residues embedded", total, done=done, quiet=quiet) as progress:
        for group, records in job.groups() if missing else ():
            for block in (block for block in group if block.number in missing):
                blocks.write(block, _contents(job, block, records, progress))
    return job.embedder.num_halved


def _contents(
    job: Job, block: Block, records: Mapping[int, Record], progress: JobProgress
) -> Iterator[tuple[int, bytes | None]]:
    """Yields the number of each record, and its vectors unless they do not fit into the memory."""
    for batch in block.batches:
        # A protein without a range has no vectors, so it fits into any memory.
        numbers = [int(number) for number in batch if job.plan.num_bytes[number] > 0]
        members = [records[number] for number in numbers]
        sequences = [record.sequence for record in members]
        ranges = [job.inputs.ranges.of(record.identifier) for record in members]
        names = [record.identifier for record in members]
        computed = job.embedder.vectors(sequences, ranges, names) if members else []
        for number, record, vectors in zip(numbers, members, computed, strict=True):
            if vectors is None:
                yield number, None
            else:
                job.embedder.checked(vectors, printable(record.identifier))
                yield number, _encode(job, record, vectors)
        progress.advance(job.plan.residues([batch]))


def _encode(job: Job, record: Record, vectors: Vectors) -> bytes:
    dtype = job.options.dtype
    contents = []
    for key in job.keys:
        narrow = vectors[key].to(getattr(torch, dtype))
        if dtype is Dtype.float16 and narrow.isinf().any():
            raise UserError(
                f"the vectors of {printable(record.identifier)} have numbers that are too large "
                "for float16; type --dtype float32"
            )
        bits = narrow.view(torch.int16) if dtype is Dtype.bfloat16 else narrow
        contents.append(bits.contiguous().numpy().tobytes())
    return b"".join(contents)


@dataclass(frozen=True)
class Embedded:
    """A protein and its vectors, (D,) or (rows, D), by kind and layer; bfloat16 as uint16."""

    record: Record
    original_id: str
    vectors: dict[Key, np.ndarray]
    num_windows: int
    ranges: tuple[tuple[int, int], ...]


class Results:
    """The vectors of a job that is finished.

    `too_large` lists the records that did not fit into the memory, `skipped` all without vectors.
    """

    def __init__(self, job: Job, blocks: Blocks) -> None:
        self.job, self._blocks = job, blocks
        self._failed = self._verify()
        self.too_large: list[tuple[str, str]] = []
        if self._failed:
            # The share that it did not fit into was perhaps computed on another device.
            room = job.embedder.room
            self.too_large = [
                (record.identifier, room.reason(len(record.sequence)))
                for number, record in job.inputs
                if int(job.plan.first[number]) in self._failed
            ]
        self.skipped = [*job.inputs.proteins.without_entry(), *self.too_large]

    def __len__(self) -> int:
        return len(self.job.inputs.lengths) - len(self.too_large)

    def __iter__(self) -> Iterator[Embedded]:
        job = self.job
        for number, record in job.inputs:
            if int(job.plan.first[number]) not in self._failed:
                yield Embedded(
                    record,
                    job.inputs.proteins.renamed.get(record.identifier, record.identifier),
                    self._vectors(number, record),
                    num_windows(len(record.sequence), job.model.max_residues),
                    job.inputs.ranges.of(record.identifier),
                )

    def check(self) -> None:
        self._blocks.work.check()

    def attributes(self) -> dict[str, object]:
        """Returns the attributes of the output, and the skipped records."""
        return {**self.job.attributes, "skipped": self.skipped}

    def offsets(self, kind: Pooling) -> np.ndarray:
        """Returns where the vectors of each protein begin when all are end to end, and the end."""
        failed = np.fromiter(self._failed, np.int64, len(self._failed))
        rows = self.job.inputs.num_rows(kind)[~np.isin(self.job.plan.first, failed)]
        return np.concatenate([[0], np.cumsum(rows)])

    def blocks(self) -> Iterator[list[Embedded]]:
        """Yields the proteins in lists that are small enough for the memory."""
        # Of vectors that are smaller, a number of proteins is enough.
        least = _BLOCK_VALUES // _BLOCK_PROTEINS

        def size_of(protein: Embedded) -> int:
            return max(sum(values.size for values in protein.vectors.values()), least)

        return blocks_of(self, size_of, _BLOCK_VALUES)

    def _vectors(self, number: int, record: Record) -> dict[Key, np.ndarray]:
        job, vectors, start = self.job, {}, 0
        values = np.frombuffer(self._blocks.read(number), stored(job.options.dtype))
        rows = values.reshape(-1, job.width)
        num_ranges = len(job.inputs.ranges.of(record.identifier))
        for kind, layer in job.keys:
            end = start + kind.num_rows(len(record.sequence), num_ranges)
            vectors[kind, layer] = rows[start:end] if kind.is_matrix else rows[start]
            start = end
        return vectors

    def _verify(self) -> set[int]:
        """Returns the numbers of the distinct records that did not fit into the memory."""
        blocks = self.job.plan.blocks
        states = [self._blocks.too_large(block) for block in blocks]
        sizes = [len(block.batches) for block in blocks]
        missing = sum(n for n, state in zip(sizes, states, strict=True) if state is None)
        if missing:
            raise UserError(
                f"{missing:,} of {sum(sizes):,} batches in {self._blocks.folder} are not finished: "
                "run every --shard to its end, or type the command without --merge"
            )
        return set[int]().union(*(state for state in states if state))


def end_to_end(block: list[Embedded], key: Key) -> np.ndarray:
    """Returns the vectors of several proteins as the rows of one matrix."""
    return np.concatenate([np.atleast_2d(protein.vectors[key]) for protein in block])
