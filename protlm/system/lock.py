"""One writer per folder: a lock file that names its owner and that the kernel keeps locked."""

import errno
import fcntl
import json
import os
import socket
import stat
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Self

from protlm.system.errors import OutputError
from protlm.system.json_file import from_json
from protlm.system.terminal import printable

LOCK = "lock.json"
# What flock answers on file systems that do not implement it.
_NO_FLOCK = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}
# The processes that this one started and killed, which could not release their locks.
KILLED: set[int] = set()


@dataclass(frozen=True)
class _Owner:
    """The process that a lock file names; a SLURM job keeps its number when it is requeued."""

    host: str
    pid: int
    since: str
    job: str | None = None
    restart: int | None = None

    @classmethod
    def this_process(cls) -> Self:
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        job, count = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "")
        name = f"{os.environ.get('SLURM_CLUSTER_NAME', '')}/{job}" if job else None
        restart = int(count) if count.isdecimal() else 0
        return cls(socket.gethostname(), os.getpid(), now, name, restart)

    def __str__(self) -> str:
        known = f"process {self.pid} on {self.host} since {self.since}"
        return known if self.pid else "an unknown process"


class FolderLock:
    """The lock of a folder, held from construction until `release` or the end of the process.

    The owner keeps an exclusive `flock` on the lock file, which the kernel drops when the process
    dies. Some network file systems do not share these locks between machines, and some have none:
    there, a lock file left by another process is respected unless `break_lock` is set. Messages say
    what is `doing` in the folder ("being built"), and the `option` that names it ("--out").
    """

    def __init__(self, folder: Path, doing: str, option: str, *, break_lock: bool = False) -> None:
        self._path, self._me = folder / LOCK, _Owner.this_process()
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(self._path.lstat().st_mode):
                raise OutputError(
                    f"{self._path} is not a file, so that {folder} cannot be locked: remove it, or "
                    f"choose another {option}"
                )
        try:
            self._file, is_guarded = _locked(self._path)
        except BlockingIOError:
            owner = f"{folder} is {doing} by {_owner_of(self._path)}"
            raise OutputError(f"{owner}: wait for it, or choose another {option}") from None
        # A forked child would otherwise keep the lock after its parent was killed.
        os.register_at_fork(after_in_child=self._file.close)
        try:
            # A process that was killed before it wrote its name leaves an empty file.
            if os.fstat(self._file.fileno()).st_size:
                self._take_over(is_guarded=is_guarded, break_lock=break_lock)
            self._path.write_text(json.dumps(asdict(self._me)), encoding="utf-8")
        except BaseException as error:
            if isinstance(error, OSError):
                self._path.unlink(missing_ok=True)
            self._file.close()
            raise
        self.check()

    @property
    def is_held(self) -> bool:
        """Whether this process still owns the lock, which may have been broken."""
        return not self._file.closed and _owner_of(self._path) == self._me

    def check(self) -> None:
        """Makes sure, before something is written, that the lock was not broken."""
        try:
            self._path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            told = "is gone: it was removed, or its folder was moved; this process stops"
            raise OutputError(f"{self._path} {told}") from None
        except OSError:
            # A disk that fails for a moment: what is written next will tell.
            return
        if not self.is_held:
            told = f"{self._path} now belongs to {_owner_of(self._path)}, which took it over"
            raise OutputError(f"{told}: this process stops")

    def release(self) -> None:
        """Removes the lock file, unless another process has taken it over."""
        try:
            if self.is_held:
                self._path.unlink()
        finally:
            self._file.close()

    def _take_over(self, *, is_guarded: bool, break_lock: bool) -> None:
        owner, me = _owner_of(self._path), self._me
        # SLURM ends a job everywhere before it starts it again.
        is_requeued = me.job is not None and owner.job == me.job
        is_dead = is_requeued and owner.restart in range(me.restart or 0)
        if not (is_dead or break_lock or (is_guarded and owner.host == me.host)):
            raise OutputError(
                f"{self._path.parent} is locked by {owner}, and this process cannot see whether "
                "that one is still running: if it is not, type the same command with --break-lock"
            )
        print(printable(f"taking over from {owner}, which is no longer running"), file=sys.stderr)


def remove_locks_of_killed(folder: Path) -> None:
    """Removes the locks anywhere in a folder of processes that this one started and killed."""
    for path in list(folder.rglob(LOCK)):
        owner = _owner_of(path)
        if owner.pid in KILLED and owner.host == socket.gethostname():
            path.unlink()
            with suppress(OSError):
                path.parent.rmdir()


def _locked(path: Path, mode: str = "rb") -> tuple[IO[bytes], bool]:
    """Opens and locks the lock file; returns it, and whether its file system has locks."""
    flags = os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    flags |= os.O_RDONLY if mode == "rb" else os.O_RDWR
    file: IO[bytes] = os.fdopen(os.open(path, flags, 0o666), mode, 0)
    is_guarded = True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        is_guarded = False
        if error.errno not in _NO_FLOCK:
            file.close()
            # NFS locks only files that are open for writing, but a file that is keeps its disk from
            # being remounted read-only.
            if error.errno == errno.EBADF and mode == "rb":
                return _locked(path, "r+b")
            raise
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file, is_guarded
    # The owner before removed the file after it was opened here.
    file.close()
    return _locked(path, mode)


def _owner_of(lock: Path) -> _Owner:
    """Returns the owner that a lock file names; an unknown one if the file is damaged."""
    with suppress(OSError, ValueError, RecursionError):
        return from_json(_Owner, json.loads(lock.read_bytes()))
    return _Owner("", 0, "")
