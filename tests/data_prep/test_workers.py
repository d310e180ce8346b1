"""Workers: results in the order of the items, and an end for whatever becomes of a worker."""

import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_prep.workers import WorkerDiedError, in_order
from protlm.errors import ExitCode, InputDataError

ROOT = Path(__file__).resolve().parent.parent.parent


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
def test_an_error_comes_where_its_item_is(workers):
    def fail(number):
        if number >= 7:
            raise InputDataError(f"item {number}")
        return number

    seen = []
    with pytest.raises(InputDataError, match="item 7"):
        for _, result in in_order(fail, ((i, i) for i in range(30)), workers):
            seen.append(result)
    assert seen == list(range(7))


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
    """A rule may hold a table of gigabytes, and what cannot be pickled."""
    held = {"unpicklable": lambda number: number + 1}
    assert results(held["unpicklable"], 5, 2)[-1] == ("tag 4", 5)


def test_items_and_results_of_any_size_come_whole():
    """A slot that held much is used again for little."""
    sizes = [n * 100_003 % 3_000_001 for n in range(30)]
    items = ((size, bytes([size % 251]) * size) for size in sizes)
    stream = in_order(lambda item: (item[::-1], len(item)), items, 3)
    assert list(stream) == [(n, (bytes([n % 251]) * n, n)) for n in sizes]


def test_an_error_tells_where_in_the_worker_it_was():
    def stumble(number):
        raise KeyError(number)

    with pytest.raises(KeyError) as caught:
        results(stumble, 3, 2)
    assert "in stumble" in "".join(caught.value.__notes__)


def test_a_result_that_cannot_be_handed_over_is_an_error():
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        results(lambda number: lambda: number, 5, 2)


def test_nothing_is_left_of_a_stream_that_is_given_up():
    def state():
        # What others left to be collected may close its files at any moment.
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())), multiprocessing.active_children()

    before = state()
    stream = in_order(abs, ((n, n) for n in range(1_000)), 2)
    next(stream)
    assert len(multiprocessing.active_children()) == 2
    stream.close()
    assert state() == before


def test_a_killed_worker_ends_the_stream_with_a_sentence():
    def die(number):
        if number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    with pytest.raises(WorkerDiedError, match=r"killed.*fewer --workers") as caught:
        results(die, 30, 2)
    assert caught.value.exit_code is ExitCode.INTERNAL


# The parent says who its workers are, and is then killed or interrupted in mid-stream.
PARENT = """
import os, signal, sys, time
from data_prep.workers import in_order
from protlm.errors import exit_with_message

def work(number):
    time.sleep(0.05)
    return os.getpid()

def run():
    for _, pid in in_order(work, ((i, i) for i in range(10_000)), 2):
        print(pid, flush=True)

# A shell lets what it starts in the background ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
exit_with_message(run)
"""


@pytest.fixture
def parent():
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield process
    process.kill()
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
        assert time.monotonic() < deadline, "workers are left behind"
        time.sleep(0.02)


def test_ctrl_c_ends_all_without_a_traceback(parent):
    workers = two_workers(parent)
    # As a terminal does it: to the whole group.
    os.killpg(parent.pid, signal.SIGINT)
    told = parent.communicate(timeout=60)[1]
    assert parent.returncode == 130, told
    assert "Traceback" not in told
    assert not any(map(is_running, workers))
