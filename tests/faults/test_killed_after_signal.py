"""A signal and no patience: SIGKILL a moment later, a second signal, a first too soon.

The moments are many and the imports slow, so one process imports, and a fork of it trains.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from protlm.checkpoints.format import newest_whole, step_of

PROGRAM = """
import json, os, random, signal, sys, time
from pathlib import Path
import protlm.commands.train as command
from protlm.errors import exit_with_message
from protlm.checkpoints.metrics import read_metrics
from protlm.training.module import LanguageModeling
from protlm.training.callbacks.save_checkpoints import SaveCheckpoints

def start(run_dir, *settings):
    if pid := os.fork():
        return pid
    os.setsid()
    sys.argv[1:] += [f"run_dir={run_dir}", *settings]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command.main()
    except SystemExit as end:
        os._exit(end.code or 0)

def wait_for_step(run_dir, step):
    while not any(row["step"] >= step for row in read_metrics(Path(run_dir) / "metrics.csv")):
        time.sleep(0.005)

def end_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""

KILL = """
rng, codes = random.Random(0), []
for turn in range(TURNS):
    pid = start("run", "trainer.max_steps=1000000", "trainer.log_every=1",
                "trainer.checkpoint_every=3", "trainer.valid_every=5")
    wait_for_step("run", 4 * turn + 2)
    os.kill(pid, signal.SIGUSR1)
    time.sleep(rng.uniform(0, 0.08))
    os.kill(pid, signal.SIGKILL)
    codes.append(end_of(pid))
print(json.dumps(codes))
"""

SECOND = """
work = LanguageModeling.training_step

def hang(self, batch, index):
    if index == 2:
        Path(f"{os.getpid()}").touch()
        while True:
            time.sleep(100)
    return work(self, batch, index)

LanguageModeling.training_step = hang
codes = []
for run_dir, numbers, pause in (
    ("twice", [signal.SIGTERM, signal.SIGTERM], 1.2),
    ("mixed", [signal.SIGUSR1, signal.SIGINT], 1.2),
):
    pid = start(run_dir, "trainer.max_steps=9")
    while not Path(f"{pid}").exists():
        time.sleep(0.01)
    for number in numbers:
        os.kill(pid, number)
        time.sleep(pause)
    codes.append(end_of(pid))
LanguageModeling.training_step = work

# What the process group got and the launcher passed on is one signal.
def echo(self, batch, index):
    if index == 2:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
    return work(self, batch, index)

LanguageModeling.training_step = echo
codes.append(end_of(start("echo", "trainer.max_steps=9")))
LanguageModeling.training_step = work

# To the whole process group, as SLURM sends it: the loader's workers live on until the end.
for run_dir, number in (("group-term", signal.SIGTERM), ("group-usr1", signal.SIGUSR1)):
    pid = start(run_dir, "trainer.max_steps=100000", "trainer.log_every=1", "data.num_workers=1")
    wait_for_step(run_dir, 3)
    os.killpg(pid, number)
    codes.append(end_of(pid))

# Too soon: before anything of the run is there, and between Lightning's handlers and ours.
read = command.open_data

def linger(config):
    Path(f"{os.getpid()}").touch()
    time.sleep(100)

command.open_data = linger
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    pid = start("early", "trainer.max_steps=9")
    while not Path(f"{pid}").exists():
        time.sleep(0.01)
    os.kill(pid, number)
    codes.append(end_of(pid))
command.open_data = read

begin = SaveCheckpoints.on_fit_start

def on_fit_start(self, *rest):
    os.kill(os.getpid(), signal.SIGTERM)
    begin(self, *rest)

SaveCheckpoints.on_fit_start = on_fit_start
codes.append(end_of(start("between", "trainer.max_steps=9")))
print(json.dumps(codes))
"""


@pytest.fixture
def run_program(
    one_process: dict[str, str], tiny_settings: list[str], tmp_path: Path
) -> Callable[[str], list[int]]:
    """Runs a program after `PROGRAM` and returns the exit codes that it prints."""

    def run(program: str) -> list[int]:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM + program, *tiny_settings],
            cwd=tmp_path,
            env=one_process,
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.mark.slow
def test_killed_a_moment_after_the_signal(
    run_program: Callable, train_tiny: Callable[..., Path], tmp_path: Path, log_of: Callable
) -> None:
    """The new checkpoint is there or the previous one is, and the run resumes from it."""
    turns = 12
    codes = run_program(KILL.replace("TURNS", str(turns)))
    # Some were killed before they had saved and ended, and no start failed.
    assert set(codes) <= {-9, 75} and -9 in codes
    run = tmp_path / "run"
    newest, faults = newest_whole(run)
    assert newest is not None and faults == []
    last = step_of(newest) + 2
    settings = ("trainer.log_every=1", "trainer.valid_every=5", f"trainer.max_steps={last}")
    train_tiny(run, *settings)
    whole = train_tiny(tmp_path / "whole", *settings)
    assert log_of(run) == log_of(whole)


@pytest.mark.slow
def test_a_second_signal_a_signal_twice_and_a_signal_too_soon(
    run_program: Callable, tmp_path: Path
) -> None:
    twice, mixed, echo, *groups, term, usr1, usr2, between = run_program(SECOND)
    # At once, although the step never ends, with the code of the second signal.
    assert (twice, mixed) == (128 + 15, 128 + 2)
    assert echo == 75 and groups == [75, 75]
    # By the signal itself, with nothing half-written.
    assert (term, usr1, usr2) == (-15, -10, -12)
    assert not (tmp_path / "early").exists()
    # As soon as our handlers are in place, the signal that came before is known.
    assert between == 75
    newest, _ = newest_whole(tmp_path / "between")
    assert newest is not None and step_of(newest) == 1
    for pid in (path.name for path in tmp_path.iterdir() if path.name.isdigit()):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
