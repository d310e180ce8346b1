"""One writer to a folder: a lock file that says who writes there, and since when."""

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
from typing import ClassVar

from protlm.errors import OutputError

LOCK = "lock.json"
_MAX_PID = 2**31 - 1


@dataclass(frozen=True)
class Holder:
    """A process that holds a lock, told apart from a later one with the same number.

    Args:
        host: the name of its machine.
        pid: its number there.
        since: when it took the lock, for people.
        start: when the process started, in the ticks of its machine; None where nobody knows.
        job: its job of SLURM, whose number stays the same when the job is requeued.
        restart: how many times the job was requeued before.
    """

    host: str
    pid: int
    since: str
    start: str | None
    job: str | None = None
    restart: int = 0

    @classmethod
    def this_process(cls) -> "Holder":
        """The holder that this process is."""
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            since=datetime.now().astimezone().isoformat(timespec="seconds"),
            start=_start_of(os.getpid()),
            job=_slurm_job(),
            restart=int(os.environ.get("SLURM_RESTART_COUNT") or 0),
        )

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, on this machine."""
        return self.host == socket.gethostname()

    @property
    def is_running(self) -> bool:
        """Whether a process of this machine is still the one that took the lock."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return _start_of(self.pid) == self.start

    def is_known_to_be_gone(self, me: "Holder") -> bool:
        """Whether `me` can tell that it runs no more: a dead process here, or an ended turn."""
        if self.is_here:
            return not self.is_running
        # SLURM ends a job everywhere before it starts it again.
        return self.job is not None and self.job == me.job and self.restart < me.restart


class FolderLock:
    """The lock of a folder, held from the constructor on until `release`.

    A lock whose holder is known to be gone is taken over, with a line that says so; one of another
    machine otherwise only with `break_lock`, for nobody here can know whether it is still needed.
    Subclasses word what the others are told.

    Raises:
        OutputError: another process holds the lock, or the folder cannot be written to.
    """

    # What happens in the folder; what to type while it does; what to type when it surely does not.
    doing: ClassVar[str]
    if_running: ClassVar[str]
    if_gone: ClassVar[str]

    def __init__(self, folder: Path, *, break_lock: bool = False) -> None:
        self._path = folder / LOCK
        self._me = Holder.this_process()
        with _one_at_a_time(folder):
            while not self._write():
                self._take_over(break_lock=break_lock)

    def _write(self) -> bool:
        """Writes the lock, complete or not at all, or finds that there is one."""
        # An empty one, of a process that was killed just then, nobody could judge.
        whole = self._path.with_name(f".{LOCK}.{self._me.host}.{self._me.pid}")
        while True:
            try:
                with whole.open("w", encoding="utf-8") as file:
                    json.dump(asdict(self._me), file)
                    file.flush()
                    os.fsync(file.fileno())
                _give_name(whole, self._path)
            except FileExistsError:
                return False
            except FileNotFoundError:
                # Who has the lock tidies up, and takes this for the rest of a dead process.
                if not whole.parent.exists():
                    raise
            else:
                return True
            finally:
                whole.unlink(missing_ok=True)

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
        """Gives the lock back, unless somebody has broken it."""
        if self.is_held:
            self._path.unlink()

    def _take_over(self, *, break_lock: bool) -> None:
        holder = _read(self._path)
        folder, is_here = self._path.parent, holder is not None and holder.is_here
        if holder is None or not holder.is_known_to_be_gone(self._me):
            if is_here:
                raise OutputError(f"{folder} is {self.doing} by {_who(holder)}: {self.if_running}")
            if not break_lock:
                advice = self.if_gone.format(lock=self._path)
                raise OutputError(
                    f"{folder} is locked by {_who(holder)}, and whether that still runs cannot be "
                    f"seen from here: if it does not, {advice}"
                )
        print(f"taking over from {_who(holder)}, which is gone", file=sys.stderr)
        self._path.unlink(missing_ok=True)


def _give_name(whole: Path, name: Path) -> None:
    """Gives a file another name too, in one step.

    Raises:
        FileExistsError: there is a file of that name.
        FileNotFoundError: the file is gone.
    """
    try:
        os.link(whole, name)
    except FileNotFoundError:
        raise
    except OSError:
        # A file system that knows no links; if there is such a file, it is found once more.
        with name.open("xb") as file:
            file.write(whole.read_bytes())


def _who(holder: Holder | None) -> str:
    if holder is None:
        return "a process that left a damaged lock"
    return f"process {holder.pid} on {holder.host} since {holder.since}"


def _read(path: Path) -> Holder | None:
    """Who holds the lock; None if it is damaged or gone."""
    with suppress(OSError, ValueError, TypeError):
        holder = Holder(**json.loads(path.read_text(encoding="utf-8")))
        # 0 and negative numbers mean groups of processes to the system.
        is_pid = isinstance(holder.pid, int) and 0 < holder.pid <= _MAX_PID
        if is_pid and isinstance(holder.restart, int):
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
