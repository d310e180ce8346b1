"""The finished vectors of all proteins, in the order of the input."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from protlm.commands.embedding.job import Job, Key
from protlm.commands.embedding.options import Dtype
from protlm.commands.embedding.parts import NO_MEMORY, Parts
from protlm.data.records import Record
from protlm.model.pooling import Pooling
from protlm.system.errors import UserError

# The numbers, and the proteins, that are written at a time.
_BLOCK_VALUES, _BLOCK_PROTEINS = 1 << 24, 1 << 14


@dataclass(frozen=True)
class Embedded:
    """A protein and its vectors, (D,) or (rows, D), by kind and layer.

    Arrays of bfloat16 contain its bits as uint16.
    """

    record: Record
    original_id: str
    vectors: dict[Key, np.ndarray]
    num_windows: int
    ranges: tuple[tuple[int, int], ...]


class Results:
    """The vectors of a job, all of which are finished.

    Args:
        job: the proteins.
        parts: the finished batches, which are verified.

    `too_large` lists identifier and reason of the records that did not fit into the memory, and
    `skipped` of all records without vectors.
    """

    def __init__(self, job: Job, parts: Parts) -> None:
        self.job, self._parts = job, parts
        self._failed = self._verify()
        self.too_large: list[tuple[str, str]] = []
        if self._failed:
            # The share that it did not fit into was perhaps computed on another device.
            room = job.embedder.room
            self.too_large = [
                (record.identifier, room.reason(len(record.sequence)))
                for number, record in job.records()
                if int(job.plan.first[number]) in self._failed
            ]
        self.skipped = [*job.proteins.without_entry(), *self.too_large]

    def __len__(self) -> int:
        return len(self.job.proteins) - len(self.too_large)

    def __iter__(self) -> Iterator[Embedded]:
        job = self.job
        for number, record in job.records():
            if int(job.plan.first[number]) in self._failed:
                continue
            yield Embedded(
                record,
                job.original_id(record),
                self._vectors(number, record),
                job.windows_of(record),
                job.ranges_of(record),
            )

    @property
    def dtype(self) -> Dtype:
        """The type of the numbers."""
        return self.job.options.dtype

    @property
    def num_values(self) -> int:
        """The number of stored numbers, at most."""
        return int(self.job.plan.num_bytes.sum()) // self.dtype.stored.itemsize

    def offsets(self, kind: Pooling) -> np.ndarray:
        """Returns where the vectors of each protein begin when all are end to end, and the end."""
        failed = np.fromiter(self._failed, np.int64, len(self._failed))
        rows = self.job.rows_of_all(kind)[~np.isin(self.job.plan.first, failed)]
        return np.concatenate([[0], np.cumsum(rows)])

    def blocks(self) -> Iterator[list[Embedded]]:
        """Yields the proteins in lists that are small enough for the memory."""
        block: list[Embedded] = []
        num_values = 0
        for protein in self:
            block.append(protein)
            num_values += sum(values.size for values in protein.vectors.values())
            if num_values >= _BLOCK_VALUES or len(block) == _BLOCK_PROTEINS:
                yield block
                block, num_values = [], 0
        if block:
            yield block

    def _vectors(self, number: int, record: Record) -> dict[Key, np.ndarray]:
        values = np.frombuffer(self._parts.read(number), self.dtype.stored)
        found, start = {}, 0
        for kind, layer in self.job.keys:
            rows = self.job.rows(kind, record)
            end = start + rows * self.job.width
            shape = (rows, self.job.width) if kind.is_matrix else (self.job.width,)
            found[kind, layer] = values[start:end].reshape(shape)
            start = end
        return found

    def _verify(self) -> set[int]:
        """Returns the numbers of the distinct records that did not fit into the memory."""
        failed, missing, total = set(), 0, 0
        for unit in range(len(self.job.plan.units)):
            finished = self._parts.finished(unit)
            for index, batch in enumerate(self.job.plan.batches(unit)):
                total += 1
                if index not in finished:
                    missing += 1
                    continue
                places = np.flatnonzero(finished[index] == NO_MEMORY)
                failed |= {batch.records[place] for place in places}
        if missing:
            raise UserError(
                f"{missing:,} of {total:,} batches in {self._parts.folder} are not finished: run "
                "every --shard to its end, or type the command without --merge"
            )
        return failed


def end_to_end(block: list[Embedded], key: Key) -> np.ndarray:
    """Returns the vectors of several proteins as the rows of one matrix."""
    return np.concatenate([np.atleast_2d(protein.vectors[key]) for protein in block])
