"""`OUT.partial`: the folder of finished batches, from which an interrupted `embed` continues.

The file of a unit is a pure function of the plan: every batch has its place and its SHA-256 there.
A batch that is missing, partial or damaged is computed again, and the others are kept.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, final

import numpy as np

from protlm.commands.embedding.options import Share
from protlm.commands.embedding.plan import DIGEST_BYTES, Batch, Plan
from protlm.errors import InputDataError, OutputError, UserError
from protlm.json_file import read_json
from protlm.lock import FolderLock
from protlm.paths import OUTPUT_FAULTS, beside, explain_os_error, fsync
from protlm.terminal import printable

_PLAN = "plan.json"
# The status of a record: its vectors are there, or it did not fit into the memory.
PRESENT, NO_MEMORY = 1, 2


@final
class _ShareLock(FolderLock):
    """The lock of one share of the work."""

    doing = "being computed"
    if_running = "wait for it, or choose another --output"
    if_gone = "remove {lock} and type the same command again"


class Parts:
    """The unfinished results of one output, in a folder beside it.

    Args:
        output: the output.
        plan: the units.
    """

    def __init__(self, output: Path, plan: Plan) -> None:
        self.folder, self._plan = partial_folder(output), plan
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

    def check_alone(self) -> None:
        """Makes sure that no other share is being computed, before the folder is removed."""
        whole = self.folder / _folder_name(Share())
        for folder in sorted(self.folder.glob("share-*-of-*")):
            if folder != whole:
                _ShareLock(folder).release()
                with suppress(OSError):
                    folder.rmdir()

    def remove(self) -> None:
        """Removes the folder after the output has its name."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _map(self, unit: int) -> np.ndarray:
        return np.memmap(self._path(unit), np.uint8, "r")

    def _path(self, unit: int) -> Path:
        return self.folder / f"{unit:06d}.part"


def partial_folder(output: Path) -> Path:
    """Returns the folder of the unfinished results of an output."""
    return beside(output, ".partial")


def _folder_name(share: Share) -> str:
    return f"share-{share.number}-of-{share.count}"


@contextmanager
def opened(
    output: Path,
    plan: Plan,
    fingerprint: Mapping[str, Any],
    share: Share,
    *,
    quiet: bool = False,
) -> Iterator[Parts]:
    """Yields the unfinished results of an output, while this process owns a share of them.

    After an error, finished batches are kept, which is printed unless `quiet`; if there are none,
    the folder is removed.
    """
    parts = Parts(output, plan)
    folder = parts.folder / _folder_name(share)
    lock, is_done = None, False
    try:
        _begin(parts.folder, fingerprint)
        folder.mkdir(exist_ok=True)
        lock = _ShareLock(folder)
        yield parts
        is_done = True
    except OSError as error:
        if error.errno in OUTPUT_FAULTS:
            raise explain_os_error(error, output) from error
        raise
    except KeyboardInterrupt:
        # The command says itself how to continue.
        quiet = True
        raise
    finally:
        if lock is not None:
            lock.release()
        with suppress(OSError):
            folder.rmdir()
        if not is_done:
            _leave(parts.folder, quiet=quiet or lock is None)


def _begin(folder: Path, fingerprint: Mapping[str, Any]) -> None:
    """Writes the fingerprint, or checks that it is that of the unfinished results."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _PLAN
    if not path.exists():
        if any(entry.suffix == ".part" for entry in folder.iterdir()):
            raise OutputError(f"{path} is missing: {_again(folder)}")
        temporary = folder / f"{_PLAN}.{os.getpid()}"
        try:
            temporary.write_text(json.dumps(dict(fingerprint), indent=2) + "\n", encoding="utf-8")
            fsync(temporary)
            # Another share may do the same: the fingerprint that remains is compared below.
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    compare(folder, fingerprint)


def read_fingerprint(output: Path) -> dict[str, Any] | None:
    """Returns the fingerprint of unfinished results; None if there are none."""
    path = partial_folder(output) / _PLAN
    try:
        return read_json(path, "a plan") if path.exists() else None
    except InputDataError as error:
        raise InputDataError(f"{error}; {_again(path.parent)}") from None


def compare(folder: Path, fingerprint: Mapping[str, Any]) -> None:
    """Checks that unfinished results have a fingerprint."""
    begun = read_fingerprint(folder.with_name(folder.name.removesuffix(".partial"))) or {}
    for name, value in fingerprint.items():
        if begun.get(name) != value:
            raise UserError(
                printable(
                    f"{folder} was begun with {name} {_short(begun.get(name))}, and now it is "
                    f"{_short(value)}: type the command as it was then, or, to start over, "
                    f"type: rm -r {folder}"
                )
            )


def _short(value: object) -> str:
    return value[:16] if isinstance(value, str) else json.dumps(value)


def _again(folder: Path) -> str:
    return f"remove the folder {folder} and type the same command again"


def _leave(folder: Path, *, quiet: bool) -> None:
    """Removes the folder if it has no batch, and no other process uses it."""
    with suppress(OSError):
        entries = {entry.name for entry in folder.iterdir()}
        if entries <= {_PLAN}:
            (folder / _PLAN).unlink(missing_ok=True)
            folder.rmdir()
        elif not quiet and any(name.endswith(".part") for name in entries):
            message = f"finished batches are kept in {folder}: the same command continues"
            print(printable(message), file=sys.stderr)
