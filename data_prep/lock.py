"""One builder to an output: a lock file that says who builds, and since when."""

import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from protlm.errors import OutputError

LOCK = "lock.json"
_MAX_PID = 2**31 - 1


@dataclass(frozen=True)
class Builder:
    """A process that builds, told apart from a later one with the same number.

    Args:
        host: the name of its machine.
        pid: its number there.
        since: when it began to build, for people.
        start: when the process started, in the ticks of its machine; None where nobody knows.
        job: the SLURM job it belongs to, if any.
        restarts: how often SLURM has put this job back into its queue.
    """

    host: str
    pid: int
    since: str
    start: str | None
    job: str | None = None
    restarts: int = 0

    @classmethod
    def this_process(cls) -> "Builder":
        """The builder that this process is."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            since=now,
            start=_start_of(os.getpid()),
            job=_slurm_job(),
            restarts=int(os.environ.get("SLURM_RESTART_COUNT") or 0),
        )

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, on this machine."""
        return self.host == socket.gethostname()

    def continues(self, other: "Builder") -> bool:
        """Whether this is a later run of the same job: SLURM begins it when the other is dead."""
        return self.job is not None and self.job == other.job and self.restarts > other.restarts

    @property
    def is_running(self) -> bool:
        """Whether a process of this machine is still the one that began to build."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return _start_of(self.pid) == self.start


class BuildLock:
    """The lock of a folder, held from the constructor on until `release`.

    A lock that a dead process of this machine, or an earlier run of this SLURM job, left is taken
    over, with a line that says so; one of another machine only with `break_lock`, for nobody here
    can know whether it is still needed.

    Raises:
        OutputError: another process holds the lock, or the folder cannot be written to.
    """

    def __init__(self, folder: Path, *, break_lock: bool = False) -> None:
        self._path = folder / LOCK
        self._me = Builder.this_process()
        with _one_at_a_time(folder):
            if self._path.exists():
                self._take_over(break_lock=break_lock)
            self._write()

    def _write(self) -> None:
        try:
            file = self._path.open("x", encoding="utf-8")
        except FileExistsError:
            # On a file system without locks another process may have been faster.
            raise self._refusal(_read(self._path)) from None
        try:
            with file:
                json.dump(asdict(self._me), file)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            self._path.unlink(missing_ok=True)
            raise

    @property
    def is_held(self) -> bool:
        """Whether nobody has broken the lock."""
        return _read(self._path) == self._me

    def check(self) -> None:
        """Makes sure that the lock is still ours, before something is written.

        Raises:
            OutputError: somebody broke it.
        """
        if not self.is_held:
            raise OutputError(
                f"{self._path} is now of {_who(_read(self._path))}, who took over: this one ends"
            )

    def release(self) -> None:
        """Gives the lock back."""
        self._path.unlink()

    def _take_over(self, *, break_lock: bool) -> None:
        holder = _read(self._path)
        is_here = holder is not None and holder.is_here
        if holder is not None and is_here and holder.is_running:
            raise self._refusal(holder)
        is_dead = holder is not None and (is_here or self._me.continues(holder))
        if not is_dead and not break_lock:
            raise OutputError(
                f"{self._path.parent} is locked by {_who(holder)}, and whether that still runs "
                "cannot be seen from here: if it does not, type the same command with --break-lock"
            )
        print(f"taking over from {_who(holder)}, which is gone", file=sys.stderr)
        self._path.unlink()

    def _refusal(self, holder: Builder | None) -> OutputError:
        return OutputError(
            f"{self._path.parent} is being built by {_who(holder)}: wait for it, or choose "
            "another --out"
        )


def _who(holder: Builder | None) -> str:
    if holder is None:
        return "a process that left a damaged lock"
    return f"process {holder.pid} on {holder.host} since {holder.since}"


def _read(path: Path) -> Builder | None:
    """Who holds the lock; None if it is damaged or gone."""
    with suppress(OSError, ValueError, TypeError):
        holder = Builder(**json.loads(path.read_text(encoding="utf-8")))
        # 0 and negative numbers mean groups of processes to the system.
        is_pid = isinstance(holder.pid, int) and 0 < holder.pid <= _MAX_PID
        if is_pid and isinstance(holder.restarts, int):
            return holder
    return None


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Keeps two processes of a machine from taking over the same lock."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # Some network file systems know no such locks.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _slurm_job() -> str | None:
    """The SLURM job of this process, told apart from those of other clusters on the same disk."""
    number = os.environ.get("SLURM_JOB_ID")
    return f"{os.environ.get('SLURM_CLUSTER_NAME', '')}/{number}" if number else None


def _start_of(pid: int) -> str | None:
    """When a process started, since the machine did; numbers of processes are used again."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    # The name of the program, in parentheses, may hold anything; the 22nd field is the time.
    return f"{boot} {status.rpartition(')')[2].split()[19]}"
