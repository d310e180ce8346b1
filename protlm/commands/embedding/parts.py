"""`OUT.partial`: the folder of finished batches, from which an interrupted `embed` continues.

The file of a unit is a pure function of the plan: every batch has its place and its SHA-256 there.
A batch that is missing, partial or damaged is computed again, and the others are kept.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from protlm.commands.embedding.options import EmbedOptions
from protlm.commands.embedding.plan import DIGEST_BYTES, Batch, Plan
from protlm.system.shares import Share
from protlm.system.work_folder import Kind, WorkFolder, unfinished, work_folder

# The status of a record: embedded, or too large for the memory.
PRESENT, NO_MEMORY = 1, 2


EMBEDDING = Kind("embedding", "being computed", "--output")


class Parts:
    """The unfinished results of one output, in a folder beside it.

    Args:
        output: the output.
        plan: the units.
        work: the folder, once this process may write there.
    """

    def __init__(self, output: Path, plan: Plan, work: WorkFolder | None = None) -> None:
        self.folder, self._plan, self._work = unfinished(output), plan, work
        self._mapped = lru_cache(maxsize=16)(self._map)

    def finished(self, unit: int) -> dict[int, np.ndarray]:
        """Returns the status bytes of the intact batches of a unit, by their index."""
        found = {}
        with suppress(FileNotFoundError), self._path(unit).open("rb") as file:
            for index, batch in enumerate(self._plan.batches(unit)):
                file.seek(batch.offset)
                content = file.read(batch.num_bytes)
                body, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
                if len(content) == batch.num_bytes and hashlib.sha256(body).digest() == digest:
                    found[index] = np.frombuffer(body[: len(batch.records)], np.uint8)
        return found

    def write(self, unit: int, batch: Batch, statuses: list[int], vectors: list[bytes]) -> None:
        """Stores a batch at its place."""
        body = b"".join([bytes(statuses), *vectors])
        content = memoryview(body + hashlib.sha256(body).digest())
        assert len(content) == batch.num_bytes
        descriptor = os.open(self._path(unit), os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            done = 0
            while done < len(content):
                done += os.pwrite(descriptor, content[done:], batch.offset + done)
        finally:
            os.close(descriptor)

    def read(self, record: int) -> memoryview:
        """Returns the bytes of the vectors of a record, whose unit was found to be finished."""
        place = self._plan.place(record)
        return self._mapped(place.unit)[place.offset : place.offset + place.num_bytes].data

    def missing_bytes(self, share: Share) -> int:
        """Returns the bytes of the vectors of a share that have no place on the disk yet."""
        missing = 0
        for unit, records in enumerate(self._plan.units):
            if unit in share:
                path = self._path(unit)
                there = path.stat().st_size if path.exists() else 0
                missing += max(0, int(self._plan.num_bytes[records].sum()) - there)
        return missing

    def remove(self) -> None:
        """Lets the folder be removed after the output has its name."""
        assert self._work is not None
        self._work.is_published = True

    def check_alone(self) -> None:
        """Makes sure that no other share is being computed, before the output is written."""
        assert self._work is not None
        self._work.refuse_others()

    def _map(self, unit: int) -> np.ndarray:
        return np.memmap(self._path(unit), np.uint8, "r")

    def _path(self, unit: int) -> Path:
        return self.folder / f"{unit:06d}.part"


@contextmanager
def opened(
    output: Path,
    plan: Plan,
    fingerprint: Mapping[str, Any],
    options: EmbedOptions,
    *,
    quiet: bool = False,
) -> Iterator[Parts]:
    """Yields the unfinished results of an output, while this process owns a share of them.

    After an error, finished batches are kept, which is printed unless `quiet`; if there are none,
    the folder is removed.
    """
    share = options.share
    name = "" if share is None else f"share-{share.number}-of-{share.count}"
    with work_folder(
        unfinished(output), fingerprint, EMBEDDING, break_lock=options.break_lock, share=name
    ) as work:
        work.is_quiet = quiet
        try:
            yield Parts(output, plan, work)
        except KeyboardInterrupt:
            # The command says itself how to continue.
            work.is_quiet = True
            raise
