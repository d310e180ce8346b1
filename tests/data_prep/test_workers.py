"""Workers: results in order, and a clean end if a worker dies."""

import contextlib
import errno
import gc
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from protlm.data_prep import workers
from protlm.data_prep.workers import WorkerDiedError, in_order
from protlm.system.errors import ExitCode, InputDataError, UserError
from protlm.system.interruption import interrupts_held

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = Path(__file__).parent / "programs" / "print_worker_ids.py"


def results(function, count, workers):
    items = ((f"tag {i}", i) for i in range(count))
    return list(in_order(function, items, workers))


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_results_come_in_the_order_of_the_items(workers):
    def square(number):
        time.sleep(0.002 * (number % 3))
        return number**2

    assert results(square, 40, workers) == [(f"tag {i}", i**2) for i in range(40)]
    assert results(square, 0, workers) == []


@pytest.mark.parametrize("workers", [1, 3])
def test_an_error_is_raised_at_its_item(workers):
    def fail(number):
        if number >= 7:
            raise InputDataError(f"item {number}")
        return number

    seen = []
    with pytest.raises(InputDataError, match="item 7"):
        for _, result in in_order(fail, ((i, i) for i in range(30)), workers):
            seen.append(result)
    assert seen == list(range(7))


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(("fails_at", "told"), [(20, "read 12"), (10, "item 10")])
def test_an_error_of_the_items_follows_the_results_before_it(workers, fails_at, told):
    """The message must not depend on how far ahead the reader was."""

    def items():
        for number in range(12):
            yield number, number
        raise InputDataError("read 12")

    def fail(number):
        time.sleep(0.002)
        if number == fails_at:
            raise InputDataError(f"item {number}")
        return number

    seen = []
    with pytest.raises(InputDataError, match=told):
        for _, result in in_order(fail, items(), workers):
            seen.append(result)
    assert seen == list(range(min(12, fails_at)))


def test_items_are_not_read_far_ahead():
    drawn = []

    def items():
        for number in range(1_000):
            drawn.append(number)
            yield number, number

    stream = in_order(abs, items(), 2)
    for _ in range(10):
        next(stream)
    assert len(drawn) < 20
    stream.close()


def test_the_function_is_shared_and_not_copied():
    """A rule may contain gigabytes of tables, and objects that cannot be pickled."""
    held = {"unpicklable": lambda number: number + 1}
    assert results(held["unpicklable"], 5, 2)[-1] == ("tag 4", 5)


def items_of_many_sizes():
    """Items of 0 to 3 MB, large ones before small ones, whose tags are their sizes."""
    sizes = [n * 100_003 % 3_000_001 for n in range(30)]
    return [(size, bytes([size % 251]) * size) for size in sizes]


def test_items_and_results_of_any_size_are_complete():
    """A buffer with large content is reused for small content."""
    items = items_of_many_sizes()
    stream = in_order(lambda item: (item[::-1], len(item)), items, 3)
    assert list(stream) == [(size, (item, size)) for size, item in items]


def test_buffers_release_the_memory_of_large_items(monkeypatch):
    def held():
        """Returns the bytes in unlinked files that this process has open."""
        files = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
        sizes = []
        for file in files:
            with contextlib.suppress(OSError):
                status = os.fstat(file)
                sizes.append(status.st_blocks * 512 if status.st_nlink == 0 else 0)
        return sum(sizes)

    monkeypatch.setattr(workers, "_KEPT_BYTES", 10_000)
    before = held()
    items = ((n, bytes(4_000_000 if n < 12 else 10)) for n in range(40))
    for number, _ in in_order(lambda item: item, items, 2):
        if number == 39:
            assert held() < before + 100_000


@pytest.mark.parametrize("refusal", [None, errno.EACCES, errno.ENOSYS])
def test_items_are_complete_on_a_system_without_files_in_memory(monkeypatch, refusal):
    def refuse(name):
        raise OSError(refusal, os.strerror(refusal))

    if refusal is None:
        monkeypatch.delattr(os, "memfd_create")
    else:
        monkeypatch.setattr(os, "memfd_create", refuse)
    items = items_of_many_sizes()
    assert list(in_order(lambda item: item[::-1], items, 3)) == items


def test_an_error_contains_the_worker_s_traceback():
    def stumble(number):
        raise KeyError(number)

    with pytest.raises(KeyError) as caught:
        results(stumble, 3, 2)
    assert "in stumble" in "".join(caught.value.__notes__)


def test_a_result_that_cannot_be_pickled_is_an_error():
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        results(lambda number: lambda: number, 5, 2)


class TwoArgumentsError(Exception):
    def __init__(self, what, where):
        super().__init__(f"{what} at {where}")


class HoldingError(Exception):
    def __init__(self, what, where):
        super().__init__(f"{what} at {where}")
        self.held = lambda: None


@pytest.mark.parametrize("kind", [TwoArgumentsError, HoldingError])
def test_an_error_that_cannot_be_pickled_is_reported(kind):
    def stumble(number):
        raise kind("stumbled", number)

    with pytest.raises(RuntimeError, match=f"{kind.__name__}: stumbled at 0") as caught:
        results(stumble, 3, 2)
    assert "in stumble" in "".join(caught.value.__notes__)


def open_files_and_workers():
    # Garbage of earlier tests may close its files at any moment.
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())), multiprocessing.active_children()


def test_an_abandoned_stream_leaves_nothing():
    before = open_files_and_workers()
    stream = in_order(abs, ((n, n) for n in range(1_000)), 2)
    next(stream)
    assert len(multiprocessing.active_children()) == 2
    stream.close()
    assert open_files_and_workers() == before


def test_a_killed_worker_ends_the_stream_with_a_sentence():
    def die(number):
        if number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    with pytest.raises(WorkerDiedError, match=r"killed.*fewer --workers") as caught:
        results(die, 30, 2)
    assert caught.value.exit_code is ExitCode.INTERNAL


@pytest.mark.parametrize("parity", [0, 1])
def test_the_death_of_any_worker_is_detected(parity):
    """Also while the other worker is running, which would be waited for indefinitely."""

    def die(number):
        time.sleep(0.01)
        if int(multiprocessing.current_process().name.rpartition("-")[2]) % 2 == parity:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    with pytest.raises(WorkerDiedError):
        results(die, 30, 2)


@pytest.fixture
def parent():
    """A process with two workers, which is to be killed or interrupted."""
    process = subprocess.Popen(
        [sys.executable, PROGRAM],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield process
    # With its workers, which would keep its pipes open.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def two_workers(process):
    workers = set()
    while len(workers) < 2:
        workers.add(int(process.stdout.readline()))
    return workers


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_workers_end_when_their_parent_is_killed(parent):
    workers = two_workers(parent)
    parent.kill()
    deadline = time.monotonic() + 30
    while any(map(is_running, workers)):
        assert time.monotonic() < deadline, "workers are still running"
        time.sleep(0.02)


def test_ctrl_c_ends_all_processes_without_a_traceback(parent):
    workers = two_workers(parent)
    # As a terminal does it: to the whole group.
    os.killpg(parent.pid, signal.SIGINT)
    told = parent.communicate(timeout=60)[1]
    assert parent.returncode == 130, told
    assert "Traceback" not in told
    assert not any(map(is_running, workers))


def test_a_job_whose_processes_are_terminated_one_by_one(parent):
    """As in SLURM: that workers die first is not reported as a lack of memory."""
    for worker in two_workers(parent):
        os.kill(worker, signal.SIGTERM)
    time.sleep(0.3)
    parent.terminate()
    told = parent.communicate(timeout=60)[1]
    assert (parent.returncode, told) == (130, "protlm: interrupted\n")


def test_a_single_worker_that_is_terminated(parent):
    os.kill(two_workers(parent).pop(), signal.SIGTERM)
    told = parent.communicate(timeout=60)[1]
    assert parent.returncode == 1
    assert "a worker process was terminated (SIGTERM); type the same command again" in told


def test_workers_ignore_signals_that_the_parent_handles():
    """SLURM sends submitit's SIGUSR2 to all processes of a job; only the parent handles it."""
    this = os.getpid()

    def end(number, frame):
        os._exit(1) if os.getpid() != this else None

    def work(number):
        os.kill(os.getpid(), signal.SIGUSR2)
        return number

    before = signal.signal(signal.SIGUSR2, end)
    try:
        assert results(work, 20, 2) == [(f"tag {i}", i) for i in range(20)]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_signal_to_a_child_that_is_not_yet_a_worker(monkeypatch):
    """The child would otherwise remove its parent's lock and work folder."""
    fork, this = os.fork, os.getpid()

    def fork_and_interrupt():
        pid = fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return pid

    monkeypatch.setattr(os, "fork", fork_and_interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert results(abs, 5, 2) == [(f"tag {i}", i) for i in range(5)]
    finally:
        signal.signal(signal.SIGINT, before)
        if os.getpid() != this:
            os._exit(1)


def test_a_second_ctrl_c_does_not_keep_workers_alive(monkeypatch):
    stream = in_order(abs, ((n, n) for n in range(1_000)), 2)
    next(stream)
    # A signal that one thread blocks may be delivered to another, such as that of a progress bar.
    over = threading.Event()
    threading.Thread(target=over.wait, daemon=True).start()
    kill = BaseProcess.kill

    def kill_impatiently(process):
        os.kill(os.getpid(), signal.SIGINT)
        kill(process)

    monkeypatch.setattr(BaseProcess, "kill", kill_impatiently)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            stream.throw(KeyboardInterrupt())
    finally:
        signal.signal(signal.SIGINT, before)
        over.set()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_delayed_signal_arrives_after_the_block(number):
    seen = []
    before = signal.signal(number, lambda *_: seen.append("handled"))
    try:
        with interrupts_held():
            os.kill(os.getpid(), number)
            time.sleep(0.01)
            seen.append("block")
        assert seen == ["block", "handled"]
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        assert seen == ["block", "handled", "handled"]
    finally:
        signal.signal(number, before)


def test_the_limit_on_processes_is_explained(monkeypatch):
    fork, forked = os.fork, []

    def fork_twice():
        if len(forked) == 2:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        forked.append(fork())
        return forked[-1]

    monkeypatch.setattr(os, "fork", fork_twice)
    with pytest.raises(UserError, match=r"^5 worker processes.*unavailable.*fewer --workers"):
        results(abs, 5, 5)
    assert not multiprocessing.active_children()


def test_the_limit_on_open_files_is_explained():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = open_files_and_workers()
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        with pytest.raises(UserError, match=r"^256 worker processes.*open files.*ulimit -n"):
            results(abs, 5, 256)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert open_files_and_workers() == before
