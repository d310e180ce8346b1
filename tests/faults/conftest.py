"""Fixtures of the fault tests: programs in other processes, children to kill, and proteins."""

import json
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protlm.checkpoints.format import all_checkpoints
from tests.fixtures.commands import run_python
from tests.fixtures.ranks import assert_same_checkpoint, fork, read_log
from tests.small_models import structure_folder

PROGRAMS = Path(__file__).parent / "programs"
# Long enough to be interrupted.
PAIR = (
    "trainer.max_steps=150",
    "trainer.checkpoint_every=5",
    "trainer.valid_every=60",
    "trainer.log_every=1",
    "model.dropout=0.1",
)

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="session")
def told_by(one_process) -> Callable[..., Any]:
    """Runs a program of `programs/`, which must succeed; returns the JSON of its last line."""

    def run(program: str, *arguments: object, cwd: Path) -> Any:
        done = run_python(PROGRAMS / program, *arguments, cwd=cwd, env=one_process)
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture
def start(one_process, tmp_path) -> Iterator[Start]:
    """Starts a command in the folder of the test; it is killed at the end.

    `start(*command, log="log", **variables)`: what it prints is appended to the file `log`.
    """
    started = []

    def run(*command: object, log: str = "log", **variables: str) -> "subprocess.Popen[str]":
        with (tmp_path / log).open("a") as file:
            process = subprocess.Popen(
                list(map(str, command)),
                cwd=tmp_path,
                env={**one_process, **variables},
                stdout=file,
                stderr=file,
                text=True,
            )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def start_training(start, tiny_settings) -> Start:
    """Starts `protlm train` on the tiny data in `run`."""
    command = [sys.executable, "-m", "protlm.train", *tiny_settings, "run_dir=run"]
    return lambda *settings: start(*command, *settings)


@pytest.fixture
def start_child() -> Iterator[Callable[..., BaseProcess]]:
    """Forks a process that calls a function, and returns it when the function has called `ready`.

    `ready` never returns; the process is killed at the end of the test.
    """
    children: list[BaseProcess] = []

    def start(work: Callable[[Callable[[], None]], object]) -> BaseProcess:
        is_ready = fork.Event()

        def ready() -> None:
            is_ready.set()
            while True:
                signal.pause()

        child = fork.Process(target=work, args=(ready,))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child.start()
        children.append(child)
        assert is_ready.wait(60)
        return child

    yield start
    for child in children:
        child.kill()
        child.join()


@pytest.fixture(scope="session")
def proteins(tmp_path_factory) -> Path:
    """A FASTA file of 3,000 random proteins, some of them repeated, and two invalid records."""
    rng = np.random.default_rng(0)
    letters = np.frombuffer(b"ACDEFGHIKLMNPQRSTVWY", np.uint8)
    sequences = [rng.choice(letters, n).tobytes().decode() for n in rng.integers(20, 400, 2_700)]
    sequences += sequences[:300]
    records = [f">P{i} a protein\n{sequence}\n" for i, sequence in enumerate(sequences)]
    records[100:100] = [">bad\nMK-V\n", ">worse\n\n"]
    path = tmp_path_factory.mktemp("proteins") / "proteins.fasta"
    path.write_text("".join(records))
    return path


@pytest.fixture(scope="session")
def few_structures(tmp_path_factory) -> Path:
    """A folder with the three smallest structures that contacts are fitted to."""
    return Path(structure_folder(tmp_path_factory.mktemp("structures"), "fit", 3))


@pytest.fixture(scope="session")
def pair_settings(tiny_settings) -> list[str]:
    """The settings of `pair_run`, to be given to a launcher with those of its processes."""
    return [*tiny_settings, *PAIR, "run_dir=run"]


@pytest.fixture(scope="session")
def pair_run(run_ranks, tmp_path_factory) -> Path:
    """An uninterrupted run of two ranks, of which the second starts more than a second later."""
    folder = tmp_path_factory.mktemp("pair")
    run_ranks(folder, "start-apart", *PAIR)
    return folder / "run"


@pytest.fixture(scope="session")
def assert_same_as_pair(pair_run) -> Callable[[Path], None]:
    """Compares the log of a run and everything in its last checkpoint with `pair_run`."""

    def compare(run: Path) -> None:
        last, found = max(all_checkpoints(pair_run)), max(all_checkpoints(run))
        assert found.name == last.name
        assert_same_checkpoint(found, last)
        assert read_log(run) == read_log(pair_run)

    return compare
