"""Processes of this machine: results in order, and a clean end if one dies."""

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
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from protlm.system.errors import ExitCode, InputDataError, UserError
from protlm.system.interruption import interrupts_held
from protlm.system.shares import ProcessDiedError, in_order

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).parent / "programs" / "print_worker_ids.py"


def results(function: Callable[[int], Any], count: int, workers: int) -> list[tuple[int, Any]]:
    return list(in_order(function, ((i, i) for i in range(count)), workers))


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_results_come_in_the_order_of_the_items(workers: int) -> None:
    """The function is shared, since it may contain gigabytes, and what cannot be pickled."""

    def square(number: int) -> int:
        time.sleep(0.002 * (number % 3))
        return number**2

    assert results(square, 40, workers) == [(i, i**2) for i in range(40)]
    assert results(square, 0, workers) == []


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(("fails_at", "told"), [(20, "read 12"), (10, "item 10")])
def test_an_error_follows_the_results_before_it(workers: int, fails_at: int, told: str) -> None:
    """Of the function or of the items: the message must not depend on how far ahead it was read."""

    def items() -> Iterator[tuple[int, int]]:
        yield from ((number, number) for number in range(12))
        raise InputDataError("read 12")

    def fail(number: int) -> int:
        time.sleep(0.002)
        if number == fails_at:
            raise InputDataError(f"item {number}")
        return number

    seen = []
    with pytest.raises(InputDataError, match=told):
        for _, result in in_order(fail, items(), workers):
            seen.append(result)
    assert seen == list(range(min(12, fails_at)))


def test_items_are_not_read_far_ahead() -> None:
    drawn = []
    stream = in_order(abs, ((n, drawn.append(n) or n) for n in range(1_000)), 2)
    for _ in range(10):
        next(stream)
    assert len(drawn) < 20
    stream.close()


def test_items_and_results_of_any_size_are_complete() -> None:
    sizes = [n * 100_003 % 3_000_001 for n in range(30)]
    items = [(size, bytes([size % 251]) * size) for size in sizes]
    stream = in_order(lambda item: (item[::-1], len(item)), iter(items), 3)
    assert list(stream) == [(size, (item, size)) for size, item in items]


class TwoArgumentsError(Exception):
    def __init__(self, what: str, where: int) -> None:
        super().__init__(f"{what} at {where}")


def stumble(number: int) -> None:
    raise KeyError(number)


def stumble_oddly(number: int) -> None:
    raise TwoArgumentsError("stumbled", number)


def test_errors_of_a_process_have_its_traceback() -> None:
    with pytest.raises(KeyError) as caught:
        results(stumble, 3, 2)
    assert "in stumble" in str(caught.value.__cause__)
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        results(lambda number: lambda: number, 5, 2)
    with pytest.raises(BrokenProcessPool) as broken:
        results(stumble_oddly, 3, 2)
    assert "TwoArgumentsError" in str(broken.value.__cause__)


def open_files_and_processes() -> tuple[int, list[BaseProcess]]:
    # Garbage of earlier tests may close its files at any moment.
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())), multiprocessing.active_children()


def test_an_abandoned_stream_leaves_nothing() -> None:
    before = open_files_and_processes()
    stream = in_order(abs, ((n, n) for n in range(1_000)), 2)
    next(stream)
    assert len(multiprocessing.active_children()) == 2
    stream.close()
    assert open_files_and_processes() == before


def test_a_killed_process_ends_the_stream_with_a_sentence() -> None:
    """Also while another one is running, which would be waited for indefinitely."""

    def die(number: int) -> int:
        time.sleep(60 * (number == 4))
        if number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    with pytest.raises(ProcessDiedError, match=r"killed.*use fewer --workers") as caught:
        results(die, 30, 2)
    assert caught.value.exit_code is ExitCode.INTERNAL


def test_a_process_killed_while_it_passes_a_large_result_ends_the_stream() -> None:
    """The executor would wait for the rest of what is in its pipe."""
    delay = 0.0

    def work(number: int) -> bytes:
        if number == 3:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return bytes(1 << 23)

    for turn in range(10):
        delay = 0.003 * turn
        with pytest.raises(ProcessDiedError):
            results(work, 60, 2)


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
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


def two_workers(process: subprocess.Popen[str]) -> set[int]:
    workers = set()
    assert process.stdout is not None
    while len(workers) < 2:
        workers.add(int(process.stdout.readline()))
    return workers


def test_processes_end_when_their_parent_is_killed(
    parent: subprocess.Popen[str], assert_gone: Callable[[int], None]
) -> None:
    workers = two_workers(parent)
    parent.kill()
    for worker in workers:
        assert_gone(worker)


@pytest.mark.parametrize("to", ["the group, by a terminal", "one after the other, by a cluster"])
def test_an_interruption_ends_all_processes_without_a_traceback(
    parent: subprocess.Popen[str], to: str, assert_gone: Callable[[int], None]
) -> None:
    """In SLURM: that workers may die first is not reported as a lack of memory."""
    workers = two_workers(parent)
    if "terminal" in to:
        os.killpg(parent.pid, signal.SIGINT)
    else:
        for worker in workers:
            os.kill(worker, signal.SIGTERM)
        time.sleep(0.3)
        parent.terminate()
    told = parent.communicate(timeout=60)[1]
    assert (parent.returncode, told) == (130, "protlm: interrupted\n")
    for worker in workers:
        assert_gone(worker)


@contextlib.contextmanager
def handled(number: int, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_processes_ignore_signals_that_their_parent_handles() -> None:
    """SLURM sends submitit's SIGUSR2 to all processes of a job; only the parent handles it."""
    this = os.getpid()

    def work(number: int) -> int:
        os.kill(os.getpid(), signal.SIGUSR2)
        return number

    with handled(signal.SIGUSR2, lambda *_: os._exit(1) if os.getpid() != this else None):
        assert results(work, 20, 2) == [(i, i) for i in range(20)]


def test_a_signal_to_a_fork_that_is_not_yet_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child would otherwise remove its parent's lock and work folder."""
    fork, this = os.fork, os.getpid()

    def fork_and_interrupt() -> int:
        pid = fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return pid

    monkeypatch.setattr(os, "fork", fork_and_interrupt)
    try:
        with handled(signal.SIGINT, signal.default_int_handler):
            assert results(abs, 5, 2) == [(i, i) for i in range(5)]
    finally:
        if os.getpid() != this:
            os._exit(1)


def test_a_second_ctrl_c_does_not_keep_processes_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = in_order(abs, ((n, n) for n in range(1_000)), 2)
    next(stream)
    # A signal that one thread blocks may be delivered to another, such as that of a progress bar.
    over = threading.Event()
    threading.Thread(target=over.wait, daemon=True).start()
    kill = BaseProcess.kill

    def kill_impatiently(process: BaseProcess) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        kill(process)

    monkeypatch.setattr(BaseProcess, "kill", kill_impatiently)
    with handled(signal.SIGINT, signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        stream.throw(KeyboardInterrupt())
    over.set()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_delayed_signal_arrives_after_the_block(number: int) -> None:
    seen = []
    with handled(number, lambda *_: seen.append("handled")):
        with interrupts_held():
            os.kill(os.getpid(), number)
            time.sleep(0.01)
            seen.append("block")
        assert seen == ["block", "handled"]
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        assert seen == ["block", "handled", "handled"]


def test_the_limit_on_processes_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, forked = os.fork, []

    def fork_twice() -> int:
        if len(forked) == 2:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        forked.append(fork())
        return forked[-1]

    monkeypatch.setattr(os, "fork", fork_twice)
    with pytest.raises(UserError, match=r"^5 worker processes.*unavailable.*fewer --workers"):
        results(abs, 5, 5)
    assert not multiprocessing.active_children()


def test_the_limit_on_open_files_is_explained() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        with pytest.raises(UserError, match=r"^256 worker processes.*open files.*ulimit -n"):
            results(abs, 5, 256)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not multiprocessing.active_children()
