"""One training process per run directory."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

from protlm.lock import FolderLock
from protlm.paths import explain_os_error
from protlm.training.launch import is_first_rank


@final
class RunLock(FolderLock):
    """The lock of a run directory, which the first rank holds for all ranks of a run."""

    doing = "being trained"
    if_running = "wait for it, or choose another run_dir="
    if_gone = "remove {lock} and type the same command again"


@contextmanager
def locked(run_dir: Path, kind: type[FolderLock] = RunLock) -> Iterator[FolderLock | None]:
    """Creates the run directory and holds its lock; yields None on ranks other than the first."""
    if not is_first_rank():
        yield None
        return
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = kind(run_dir)
    except OSError as error:
        raise explain_os_error(error, run_dir) from error
    try:
        yield lock
    finally:
        # On a file system that became read-only the file stays, and the next start takes it over.
        with suppress(OSError):
            lock.release()
