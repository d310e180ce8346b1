"""One writer per folder: a lock file that names its owner and that the kernel keeps locked."""

import errno
import fcntl
import json
import os
import socket
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from protlm.errors import OutputError
from protlm.terminal import printable

LOCK = "lock.json"
# What flock answers on file systems that do not implement it.
_NO_FLOCK = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}


@dataclass(frozen=True)
class LockOwner:
    """The process that holds a lock, as the lock file names it.

    Args:
        host: name of its machine.
        pid: process ID on that machine.
        since: time at which it took the lock, for messages.
        job: its SLURM job, whose number stays the same when the job is requeued.
        restart: how many times the job was requeued before.
    """

    host: str
    pid: int
    since: str
    job: str | None = None
    restart: int = 0

    @classmethod
    def this_process(cls) -> "LockOwner":
        """Returns this process as an owner."""
        count = os.environ.get("SLURM_RESTART_COUNT", "")
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            since=datetime.now().astimezone().isoformat(timespec="seconds"),
            job=_slurm_job(),
            restart=int(count) if count.isdecimal() else 0,
        )

    def was_requeued_as(self, other: "LockOwner") -> bool:
        """Returns whether `other` is a later start of the same SLURM job.

        SLURM ends a job everywhere before it starts it again.
        """
        return self.job is not None and self.job == other.job and self.restart < other.restart


class FolderLock:
    """The lock of a folder, held from construction until `release` or the end of the process.

    The owner keeps an exclusive `flock` on the lock file, which the kernel drops when the process
    dies. Some network file systems do not share these locks between machines, and some have none:
    there, a lock file left by another process is respected unless `break_lock` is set.
    Subclasses provide the wording of the messages.
    """

    # What the owner does in the folder; advice while it runs, and when it is certainly dead.
    doing: ClassVar[str]
    if_running: ClassVar[str]
    if_gone: ClassVar[str]

    def __init__(self, folder: Path, *, break_lock: bool = False) -> None:
        self._path = folder / LOCK
        self._me = LockOwner.this_process()
        self._file: int | None = None
        file, is_guarded = self._open()
        try:
            before = self._previous_owner(file, is_guarded=is_guarded, break_lock=break_lock)
            self._write()
            if before is not None:
                message = f"taking over from {before}, which is no longer running"
                print(printable(message), file=sys.stderr)
        except BaseException:
            os.close(file)
            raise
        self._file = file
        # A forked child would otherwise keep the lock after its parent was killed.
        os.register_at_fork(after_in_child=self._close)
        self.check()

    @property
    def is_held(self) -> bool:
        """Whether this process still owns the lock, which may have been broken."""
        return self._file is not None and _read(self._path) == self._me

    def check(self) -> None:
        """Makes sure, before something is written, that the lock was not broken."""
        try:
            owner = _owner(self._path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise OutputError(
                f"{self._path} is gone: it was removed, or its folder was moved; this process stops"
            ) from None
        except OSError:
            # A disk that fails for a moment: what is written next will tell.
            return
        if self._file is None or owner != self._me:
            raise OutputError(
                f"{self._path} now belongs to {_who(owner)}, which took it over: this process stops"
            )

    def release(self) -> None:
        """Removes the lock file, unless another process has taken it over."""
        try:
            if self.is_held:
                self._path.unlink()
        finally:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> tuple[int, bool]:
        """Opens and locks the lock file; returns it, and whether its file system has locks."""
        # A file that is open for writing would keep its disk from being remounted read-only.
        mode = os.O_RDONLY
        while True:
            file = os.open(self._path, mode | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                is_guarded = self._flock(file)
                # The owner before may have removed the file since it was opened.
                if _is_at(file, self._path):
                    return file, is_guarded
            except OSError as error:
                os.close(file)
                # NFS locks only files that are open for writing.
                if error.errno != errno.EBADF or mode == os.O_RDWR:
                    raise
                mode = os.O_RDWR
                continue
            except BaseException:
                os.close(file)
                raise
            os.close(file)

    def _flock(self, file: int) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            who = _who(_read(self._path))
            raise OutputError(
                f"{self._path.parent} is {self.doing} by {who}: {self.if_running}"
            ) from None
        except OSError as error:
            if error.errno in _NO_FLOCK:
                return False
            raise
        return True

    def _previous_owner(self, file: int, *, is_guarded: bool, break_lock: bool) -> str | None:
        """Names the process that left the lock file, if any; refuses one that may be running."""
        if not os.fstat(file).st_size:
            return None
        owner = _read(self._path)
        is_dead = owner is not None and (
            (is_guarded and owner.host == self._me.host) or owner.was_requeued_as(self._me)
        )
        if not is_dead and not break_lock:
            raise OutputError(
                f"{self._path.parent} is locked by {_who(owner)}, and this process cannot see "
                f"whether that one is still running: if it is not, "
                f"{self.if_gone.format(lock=self._path)}"
            )
        return _who(owner)

    def _write(self) -> None:
        try:
            self._path.write_text(json.dumps(asdict(self._me)), encoding="utf-8")
        except OSError:
            self._path.unlink(missing_ok=True)
            raise


def _is_at(file: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), path.stat())
    return False


def _who(owner: LockOwner | None) -> str:
    if owner is None:
        return "an unknown process"
    return f"process {owner.pid} on {owner.host} since {owner.since}"


def _read(path: Path) -> LockOwner | None:
    """Returns the owner that a lock file names; None if the file is damaged or missing."""
    with suppress(OSError, ValueError):
        return _owner(path.read_text(encoding="utf-8"))
    return None


def _owner(text: str) -> LockOwner | None:
    with suppress(ValueError, TypeError, AttributeError, RecursionError):
        found = json.loads(text)
        names = [field.name for field in fields(LockOwner)]
        return LockOwner(**{name: found[name] for name in names if name in found})
    return None


def _slurm_job() -> str | None:
    """Returns the SLURM job of this process, with the cluster that numbered it."""
    number = os.environ.get("SLURM_JOB_ID")
    return f"{os.environ.get('SLURM_CLUSTER_NAME', '')}/{number}" if number else None
