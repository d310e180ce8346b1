"""The finished vectors of all proteins, in the order of the input."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from protlm.commands.embedding.job import Job, Key
from protlm.commands.embedding.parts import Parts
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

    `too_large` lists identifier and reason of the records that did not fit into the memory, and
    `skipped` of all records without vectors. `num_values` is the number of stored numbers, at most.
    """

    def __init__(self, job: Job, parts: Parts) -> None:
        self.job, self._parts = job, parts
        self.num_values = int(job.plan.num_bytes.sum()) // job.options.dtype.stored.itemsize
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
            if int(job.plan.first[number]) not in self._failed:
                yield Embedded(
                    record,
                    job.original_id(record),
                    self._vectors(number, record),
                    job.windows_of(record),
                    job.ranges_of(record),
                )

    def attributes(self) -> dict[str, object]:
        """Returns the attributes of the output, and the skipped records."""
        return {**self.job.attributes(), "skipped": self.skipped}

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
        job, found, start = self.job, {}, 0
        values = np.frombuffer(self._parts.read(number), job.options.dtype.stored)
        for kind, layer in job.keys:
            rows = job.rows(kind, record)
            shape = (rows, job.width) if kind.is_matrix else (job.width,)
            found[kind, layer] = values[start : start + rows * job.width].reshape(shape)
            start += rows * job.width
        return found

    def _verify(self) -> set[int]:
        """Returns the numbers of the distinct records that did not fit into the memory."""
        parts = self.job.plan.parts
        states = [self._parts.too_large(part) for part in parts]
        sizes = [len(part.batches) for part in parts]
        missing = sum(n for n, state in zip(sizes, states, strict=True) if state is None)
        if missing:
            raise UserError(
                f"{missing:,} of {sum(sizes):,} batches in {self._parts.folder} are not finished: "
                "run every --shard to its end, or type the command without --merge"
            )
        return set[int]().union(*(state for state in states if state))


def end_to_end(block: list[Embedded], key: Key) -> np.ndarray:
    """Returns the vectors of several proteins as the rows of one matrix."""
    return np.concatenate([np.atleast_2d(protein.vectors[key]) for protein in block])
