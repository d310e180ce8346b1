"""Sends signals to runs twice, to whole process groups, and early: [SETTING...].

One process imports everything and forks the runs, each with its own change. Prints the exit codes.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import protlm.commands.train as command
from protlm.checkpoints.validations import METRICS, read_metrics
from protlm.training.callbacks.save_checkpoints import SaveCheckpoints
from protlm.training.module import LanguageModeling

training_step = LanguageModeling.training_step
on_fit_start = SaveCheckpoints.on_fit_start


def announce() -> None:
    """Makes the file that `wait_until_announced` waits for."""
    Path(f"{os.getpid()}").touch()


def hang(self: LanguageModeling, batch: Any, batch_index: int) -> Any:
    """Computes a step; the third never ends."""
    while batch_index == 2:
        announce()
        time.sleep(100)
    return training_step(self, batch, batch_index)


def send_repeatedly(self: LanguageModeling, batch: Any, batch_index: int) -> Any:
    """Computes a step; in the third the signal arrives as from the group and from the launcher."""
    if batch_index == 2:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
    return training_step(self, batch, batch_index)


def open_slowly(config: Any) -> Any:
    """Announces the run before it has written anything, and never opens its data."""
    announce()
    time.sleep(100)


def send_and_start(self: SaveCheckpoints, trainer: Any, pl_module: Any) -> None:
    """Sends a signal between Lightning's setup of its handlers and the start of the run."""
    os.kill(os.getpid(), signal.SIGTERM)
    on_fit_start(self, trainer, pl_module)


def wait_until_announced(pid: int) -> None:
    """Waits until a run has announced itself."""
    while not Path(f"{pid}").exists():
        time.sleep(0.01)


def send(*numbers: signal.Signals) -> Callable[[int, str], None]:
    """Sends signals to a run that has announced itself."""

    def act(pid: int, run_dir: str) -> None:
        wait_until_announced(pid)
        for number in numbers:
            os.kill(pid, number)
            time.sleep(1.2 if len(numbers) > 1 else 0)

    return act


def send_to_group(number: signal.Signals) -> Callable[[int, str], None]:
    """Sends a signal to a run and its loader workers, as SLURM does."""

    def act(pid: int, run_dir: str) -> None:
        while not any(row["step"] >= 3 for row in read_metrics(Path(run_dir) / METRICS)):
            time.sleep(0.005)
        os.killpg(pid, number)

    return act


STEP = (LanguageModeling, "training_step")
OPEN = (command, "open_data")
TERM, USR1, USR2, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT
LONG = ("trainer.max_steps=100000", "trainer.log_every=1", "data.num_workers=1")
# What is changed in a run, by what, and what is sent to it.
CASES: dict[str, tuple[tuple[Any, str], Any, Callable[[int, str], None] | None]] = {
    "twice": (STEP, hang, send(TERM, TERM)),
    "mixed": (STEP, hang, send(USR1, INT)),
    "repeated": (STEP, send_repeatedly, None),
    "group-term": (STEP, training_step, send_to_group(TERM)),
    "group-usr1": (STEP, training_step, send_to_group(USR1)),
    "early-term": (OPEN, open_slowly, send(TERM)),
    "early-usr1": (OPEN, open_slowly, send(USR1)),
    "early-usr2": (OPEN, open_slowly, send(USR2)),
    "between": ((SaveCheckpoints, "on_fit_start"), send_and_start, None),
}


def start(run_dir: str, place: tuple[Any, str], change: Any) -> int:
    """Forks a run with the arguments of this process and a change; returns its process ID."""
    if pid := os.fork():
        return pid
    os.setsid()
    setattr(*place, change)
    length = LONG if run_dir.startswith("group") else ("trainer.max_steps=9",)
    sys.argv[1:] += [f"run_dir={run_dir}", *length]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command.main()
    except SystemExit as end:
        os._exit(int(end.code or 0))
    os._exit(0)


def main() -> None:
    """Sends all signals, one run after the other."""
    codes = {}
    for name, (place, change, act) in CASES.items():
        pid = start(name, place, change)
        if act is not None:
            act(pid, name)
        codes[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
