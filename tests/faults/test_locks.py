"""One writer per folder: a second one is refused, a dead one is taken over, a robbed one stops."""

import errno
import fcntl
import json
import os
import signal
import socket
import stat
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

import pytest

from protlm.checkpoints.format import all_checkpoints, step_of
from protlm.data.records import block
from protlm.data_prep.encode import Encoder
from protlm.data_prep.prepare import prepare
from protlm.data_prep.split import HashSplit
from protlm.system import lock as module
from protlm.system.errors import ExitCode, OutputError
from protlm.system.lock import LOCK, FolderLock
from protlm.training.callbacks.save_checkpoints import SaveCheckpoints
from protlm.training.launch import locked as locked_run
from tests.fixtures.calls import looked_at
from tests.fixtures.ranks import fork
from tests.marks import slow_but

HERE, SINCE = socket.gethostname(), "2026-01-01T00:00:00+00:00"
OTHER = {"host": "elsewhere", "pid": 1, "since": SINCE}
JOB = {**OTHER, "job": "main/12"}


def locked(folder: Path, *, break_lock: bool = False) -> FolderLock:
    return FolderLock(folder, "being built", "--out", break_lock=break_lock)


def hold(folder: Path, ready: Callable[[], None]) -> None:
    _ = locked(folder)
    ready()


@pytest.fixture
def in_job(monkeypatch) -> None:
    """This process is the first restart of a job of SLURM."""
    for variable, value in {"JOB_ID": "12", "CLUSTER_NAME": "main", "RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(f"SLURM_{variable}", value)


# What the lock file has, whom the message names, and whether the lock is taken over.
OWNERS = {
    "dead": ({"host": HERE, "pid": 2**22, "since": SINCE}, f"process {2**22}", True),
    "reused process ID": ({"host": HERE, "pid": os.getpid(), "since": SINCE}, "process", True),
    "requeued on another node": ({**JOB, "restart": 0}, "process 1 on elsewhere", True),
    "killed while it locked": (b"", None, True),
    "elsewhere": (OTHER, "process 1 on elsewhere", False),
    "another step of this start": ({**JOB, "restart": 1}, "process 1 on elsewhere", False),
    "another job": ({**JOB, "job": "other/12", "restart": 0}, "process 1 on elsewhere", False),
    "no job": ({**JOB, "job": None, "restart": 0}, "process 1 on elsewhere", False),
    "no number": ({**JOB, "restart": "0"}, "an unknown process", False),
    "no process": ({"host": "elsewhere"}, "an unknown process", False),
    "other types": ({"pid": "none", "host": 7}, "an unknown process", False),
    "deep": (b"[" * 10**5, "an unknown process", False),
    "a number": (b"3", "an unknown process", False),
    "other bytes": (b"\xff", "an unknown process", False),
}


@pytest.mark.parametrize(("content", "name", "is_taken"), OWNERS.values(), ids=OWNERS)
def test_a_lock_is_taken_over_or_explained_and_broken_on_request(
    content, name, is_taken, in_job, tmp_path, capsys
):
    written = content if isinstance(content, bytes) else json.dumps(content).encode()
    (tmp_path / LOCK).write_bytes(written)
    if not is_taken:
        with pytest.raises(OutputError, match=f"is locked by {name}.* with --break-lock"):
            locked(tmp_path)
        assert (tmp_path / LOCK).read_bytes() == written
    lock = locked(tmp_path, break_lock=not is_taken)
    told = capsys.readouterr().err
    assert f"taking over from {name}" in told if name else not told
    owner = json.loads((tmp_path / LOCK).read_text())
    assert (owner["pid"], owner["job"], owner["restart"]) == (os.getpid(), "main/12", 1)
    lock.release()
    assert not list(tmp_path.iterdir())


OTHER_KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK),
    "broken link": lambda path: path.symlink_to("nothing"),
    "loop": lambda path: path.symlink_to(path.name),
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("make", OTHER_KINDS.values(), ids=OTHER_KINDS)
@pytest.mark.parametrize("break_lock", [False, True])
def test_what_is_not_a_lock_file_is_refused_at_once(make, break_lock, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(Path(LOCK))
    with pytest.raises(OutputError, match=rf"^{LOCK} is not a file, .*: remove it, or choose"):
        locked(Path(), break_lock=break_lock)


def test_a_count_of_restarts_that_is_no_number_is_none(in_job, monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "x")
    # Of another step of the first start.
    (tmp_path / LOCK).write_text(json.dumps({**JOB, "restart": 0}))
    with pytest.raises(OutputError, match="is locked by process 1 on elsewhere"):
        locked(tmp_path)
    locked(tmp_path, break_lock=True)
    assert json.loads((tmp_path / LOCK).read_text())["restart"] == 0


@pytest.mark.parametrize("fault", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_flock(tmp_path, fail_at, fault):
    """There only the lock file shows that another process may be writing."""
    fail_at(fcntl, "flock", OSError(fault, os.strerror(fault)))
    first = locked(tmp_path)
    with pytest.raises(OutputError, match=f"by process {os.getpid()} on .*--break-lock"):
        locked(tmp_path)
    assert first.is_held
    first.release()
    assert not list(tmp_path.iterdir())
    (tmp_path / LOCK).write_text(json.dumps(OTHER))
    assert locked(tmp_path, break_lock=True).is_held


def test_a_file_system_that_locks_only_files_open_for_writing(tmp_path, look_at, fail_at):
    """NFS does so."""

    def as_nfs(file: int, how: int) -> None:
        if not fcntl.fcntl(file, fcntl.F_GETFL) & os.O_RDWR:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    look_at(fcntl, "flock", as_nfs)
    assert locked(tmp_path).is_held
    fail_at(fcntl, "flock", OSError(errno.EBADF, os.strerror(errno.EBADF)))
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        locked(tmp_path)


def test_a_lock_file_that_is_removed_while_it_is_locked_is_created_again(tmp_path, look_at):
    """The previous owner removes it between `open` and `flock`."""
    removed = []

    def remove(*_: int) -> None:
        if not removed:
            removed.append((tmp_path / LOCK).unlink())

    look_at(fcntl, "flock", remove)
    assert locked(tmp_path).is_held
    assert len(removed) == 1


def test_a_running_process_is_never_taken_over(start_child, tmp_path):
    """Nor one in another container, whose process ID has another process here, or no process."""
    pid = start_child(partial(hold, tmp_path)).pid
    for number, break_lock in product((pid, 1, 2**22), (False, True)):
        # The same file, of which the process holds the lock.
        (tmp_path / LOCK).write_text(json.dumps({"host": HERE, "pid": number, "since": SINCE}))
        before = (tmp_path / LOCK).read_bytes()
        told = f"is being built by process {number} on .*: wait .* another --out"
        with pytest.raises(OutputError, match=told):
            locked(tmp_path, break_lock=break_lock)
        assert (tmp_path / LOCK).read_bytes() == before


def test_a_killed_process_and_its_children_do_not_keep_the_lock(start_child, tmp_path, capsys):
    """Workers end some time after their parent, which has its process ID until it is waited for."""

    def hold_and_fork(ready: Callable[[], None]) -> None:
        _ = locked(tmp_path)
        parent = os.getpid()
        if not os.fork():
            while os.getppid() == parent:
                time.sleep(0.01)
            time.sleep(1)
            os._exit(0)
        ready()

    holder = start_child(hold_and_fork)
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    locked(tmp_path).release()
    assert f"taking over from process {holder.pid} on" in capsys.readouterr().err


def exit_codes(forks: list[BaseProcess]) -> list[int | None]:
    """Runs processes at the same time, and returns their exit codes in order of size."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for one in forks:
            one.start()
    for one in forks:
        one.join(120)
    return sorted(one.exitcode for one in forks)


@pytest.mark.slow
def test_of_two_processes_one_takes_over(tmp_path, look_at):
    """Both start while the first still reads the lock file."""
    (tmp_path / LOCK).write_text(json.dumps({**OTHER, "host": HERE}))
    look_at(module, "_owner_of", lambda _: time.sleep(0.3))

    def take() -> None:
        try:
            locked(tmp_path)
        except OutputError:
            os._exit(7)
        time.sleep(1)
        os._exit(0)

    assert exit_codes([fork.Process(target=take) for _ in range(2)]) == [0, 7]


def test_a_process_that_lost_its_lock_stops(tmp_path):
    lock = locked(tmp_path)
    lock.check()
    (tmp_path / LOCK).write_text(json.dumps(OTHER))
    assert not lock.is_held
    with pytest.raises(OutputError, match="now belongs to process 1 on elsewhere"):
        lock.check()
    for _ in range(2):
        lock.release()
        assert json.loads((tmp_path / LOCK).read_text()) == OTHER


@pytest.mark.parametrize("fault", [errno.EIO, errno.EMFILE, errno.ESTALE, errno.EACCES])
def test_a_disk_that_fails_for_a_moment_does_not_take_the_lock(tmp_path, fault):
    lock = locked(tmp_path)
    error = OSError(fault, os.strerror(fault), str(tmp_path / LOCK))
    with mock.patch.object(Path, "read_bytes", side_effect=error):
        lock.check()
    (tmp_path / LOCK).unlink()
    with pytest.raises(OutputError, match="is gone"):
        lock.check()


def test_a_terminated_job_has_no_lock(protlm_in_process, proteins, tmp_path, contents, monkeypatch):
    """It may resume on another machine, which cannot check whether the owner is running."""
    monkeypatch.setattr(block, "BLOCK_BYTES", 1 << 14)
    blocks = []

    def terminate(_: Encoder, block: object) -> None:
        blocks.append(block)
        if len(blocks) == 20:
            os.kill(os.getpid(), signal.SIGTERM)

    typed = ["prepare", proteins, "--shard-residues", "30000", "--out"]
    with looked_at(Encoder, "__call__", terminate):
        protlm_in_process(*typed, "data", cwd=tmp_path, code=ExitCode.INTERRUPTED)
    assert (tmp_path / "data.partial" / "journal" / "segment-00003.json").exists()
    assert not (tmp_path / "data.partial" / LOCK).exists()
    for folder in ("data", "whole"):
        protlm_in_process(*typed, folder, cwd=tmp_path)
    assert contents(tmp_path / "data") == contents(tmp_path / "whole")


def test_a_builder_that_lost_its_lock_writes_no_more_files(tmp_path, proteins, look_at):
    out = tmp_path / "data"
    lock = out.with_name("data.partial") / LOCK

    def rob(_, record, digest):
        if record.identifier == "P7":
            lock.write_text(json.dumps(OTHER))

    look_at(HashSplit, "split_of", rob)
    with pytest.raises(OutputError, match="elsewhere"):
        prepare([proteins], out, split_rule=HashSplit(0, 0))
    assert lock.is_file()
    assert not out.exists()
    assert not list(lock.parent.glob("data/*/*")), "it wrote to a folder of another builder"


@pytest.mark.parametrize(
    "command", slow_but(["prepare", "embed", "finetune", "features", "train"], "prepare")
)
def test_a_command_breaks_a_lock_on_request(
    command, protlm_in_process, tiny_run, tiny_data, tiny_settings, tmp_path, contents
):
    records = "".join(f">P{n}\nMKV{'LAW' * (n % 9)}{'WC' * (n % 7)}\n" for n in range(60))
    (tmp_path / "x.fasta").write_text(records)
    splits = ("train", "valid", "test")
    rows = [f"P{n}\t{'WC' * (n % 7 + 1)}MK\tc{n % 2}\t{splits[n % 3]}\n" for n in range(60)]
    (tmp_path / "labels.tsv").write_text("".join(["identifier\tsequence\tlabel\tsplit\n", *rows]))
    trained = ["--layer", "1", "--data", tiny_data, "--residues", "2048", "--latents", "64"]
    arguments, folder = {
        "prepare": (["x.fasta", "--out", "data"], "data.partial"),
        "embed": (["x.fasta", "-m", tiny_run, "-o", "out.h5"], "out.h5.partial"),
        "finetune": (["labels.tsv", "-m", tiny_run, "-o", "run", "--epochs", "1"], "run"),
        "features": (["train", *trained, "-m", tiny_run, "-o", "sae"], "sae.partial"),
        "train": (["run_dir=run", *tiny_settings, "trainer.max_steps=2"], "run"),
    }[command]
    (tmp_path / folder).mkdir()
    (tmp_path / folder / LOCK).write_text(json.dumps(OTHER))
    before = contents(tmp_path / folder)
    done = protlm_in_process(command, *arguments, cwd=tmp_path, code=4)
    assert "process 1 on elsewhere" in done.stderr and "--break-lock" in done.stderr
    assert contents(tmp_path / folder) == before
    protlm_in_process(command, *arguments, "--break-lock", cwd=tmp_path)
    assert not (tmp_path / folder / LOCK).exists()


LOSSES = {
    "removed": (lambda run: (run / LOCK).unlink(), "lock.json is gone: it was removed"),
    "taken over": (
        lambda run: (run / LOCK).write_text(json.dumps(OTHER)),
        "lock.json now belongs to process 1 on elsewhere",
    ),
    "moved": (
        lambda run: run.rename(run.with_name("moved")),
        "lock.json is gone.*folder was moved",
    ),
}


@pytest.mark.parametrize(("happens", "reason"), LOSSES.values(), ids=LOSSES)
def test_a_run_that_lost_its_lock_stops_without_a_checkpoint(
    happens, reason, train_tiny, tmp_path, look_at
):
    """Another process may write there now; a folder that was moved is not made again."""
    run = tmp_path / "run"

    def interfere(_, trainer, *rest):
        if trainer.global_step == 4:
            happens(run)

    look_at(SaveCheckpoints, "on_train_batch_end", interfere)
    with pytest.raises(OutputError, match=f"{reason}.*the last checkpoint is step 2") as stopped:
        train_tiny(run, "trainer.checkpoint_every=2", "trainer.max_steps=4")
    assert stopped.value.exit_code == ExitCode.OUTPUT
    (left,) = tmp_path.iterdir()
    assert [step_of(path) for path in all_checkpoints(left)] == [2]


def test_the_first_rank_holds_the_lock_until_the_run_ends(tmp_path):
    with pytest.raises(KeyboardInterrupt), locked_run(tmp_path / "run"):
        assert (tmp_path / "run" / LOCK).is_file()
        raise KeyboardInterrupt
    assert list((tmp_path / "run").iterdir()) == []
    (tmp_path / LOCK).write_text(json.dumps(OTHER))
    for variable in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        with mock.patch.dict(os.environ, {variable: "1"}), locked_run(tmp_path):
            pass
    assert (tmp_path / LOCK).exists()
