"""One writer per folder: a lock file that names its owner and that the kernel keeps locked."""

import errno
import fcntl
import json
import os
import socket
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from protlm.system.errors import OutputError
from protlm.system.terminal import printable

LOCK = "lock.json"
# What flock answers on file systems that do not implement it.
_NO_FLOCK = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}


class FolderLock:
    """The lock of a folder, held from construction until `release` or the end of the process.

    The owner keeps an exclusive `flock` on the lock file, which the kernel drops when the process
    dies. Some network file systems do not share these locks between machines, and some have none:
    there, a lock file left by another process is respected unless `break_lock` is set.

    Args:
        folder: the folder.
        doing: what its owner does there, for messages: "being built".
        option: what names the folder: "--out".
        break_lock: takes over the lock of a process that may be running on another machine.
    """

    def __init__(self, folder: Path, doing: str, option: str, *, break_lock: bool = False) -> None:
        self._path, self._doing, self._option = folder / LOCK, doing, option
        self._me = _this_process()
        self._file: int | None = None
        self._file, is_guarded = self._open(os.O_RDONLY)
        # A forked child would otherwise keep the lock after its parent was killed.
        os.register_at_fork(after_in_child=self._close)
        try:
            # A process that was killed before it wrote its name leaves an empty file.
            if os.fstat(self._file).st_size:
                self._take_over(is_guarded=is_guarded, break_lock=break_lock)
            self._path.write_text(json.dumps(self._me), encoding="utf-8")
        except BaseException as error:
            if isinstance(error, OSError):
                self._path.unlink(missing_ok=True)
            self._close()
            raise
        self.check()

    @property
    def is_held(self) -> bool:
        """Whether this process still owns the lock, which may have been broken."""
        return self._file is not None and self._owner() == self._me

    def check(self) -> None:
        """Makes sure, before something is written, that the lock was not broken."""
        try:
            owner = _parsed(self._path.read_bytes())
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

    def _open(self, mode: int) -> tuple[int, bool]:
        """Opens and locks the lock file; returns it, and whether its file system has locks."""
        file, is_guarded = os.open(self._path, mode | os.O_CREAT | os.O_NOFOLLOW, 0o666), True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(file)
            raise OutputError(
                f"{self._path.parent} is {self._doing} by {_who(self._owner())}: wait for it, or "
                f"choose another {self._option}"
            ) from None
        except OSError as error:
            is_guarded = False
            if error.errno not in _NO_FLOCK:
                os.close(file)
                # NFS locks only files that are open for writing, but a file that is keeps its disk
                # from being remounted read-only.
                if error.errno == errno.EBADF and mode == os.O_RDONLY:
                    return self._open(os.O_RDWR)
                raise
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), self._path.stat()):
                return file, is_guarded
        # The owner before removed the file after it was opened here.
        os.close(file)
        return self._open(mode)

    def _take_over(self, *, is_guarded: bool, break_lock: bool) -> None:
        """Refuses the lock file of a process that may be running."""
        owner, me = self._owner(), self._me
        # SLURM ends a job everywhere before it starts it again.
        is_requeued = me["job"] is not None and owner.get("job") == me["job"]
        is_dead = is_requeued and owner.get("restart") in range(me["restart"])
        if not (is_dead or break_lock or (is_guarded and owner.get("host") == me["host"])):
            raise OutputError(
                f"{self._path.parent} is locked by {_who(owner)}, and this process cannot see "
                "whether that one is still running: if it is not, type the same command with "
                "--break-lock"
            )
        message = f"taking over from {_who(owner)}, which is no longer running"
        print(printable(message), file=sys.stderr)

    def _owner(self) -> dict[str, Any]:
        with suppress(OSError):
            return _parsed(self._path.read_bytes())
        return {}


def _this_process() -> dict[str, Any]:
    """Returns what the lock file says of its owner; a SLURM job keeps its number when requeued."""
    job, count = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "")
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
        "job": f"{os.environ.get('SLURM_CLUSTER_NAME', '')}/{job}" if job else None,
        "restart": int(count) if count.isdecimal() else 0,
    }


def _parsed(content: bytes) -> dict[str, Any]:
    """Returns the owner that a lock file names; nothing if the file is damaged."""
    with suppress(ValueError, RecursionError):
        found = json.loads(content)
        return found if isinstance(found, dict) else {}
    return {}


def _who(owner: dict[str, Any]) -> str:
    if not {"host", "pid", "since"} <= owner.keys():
        return "an unknown process"
    return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
