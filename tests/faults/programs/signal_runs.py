"""Sends signals to runs twice, to whole process groups, and early: [SETTING...].

Prints the exit codes as a dictionary.
"""

import json
import os
import signal
import time
from typing import Any

import protlm.commands.train as command
from protlm.training.callbacks.save_checkpoints import SaveCheckpoints
from protlm.training.module import LanguageModeling
from tests.faults.programs.forked_run import (
    announce,
    exit_code_of,
    start,
    wait_for_announcement,
    wait_for_step,
)

original_step = LanguageModeling.training_step
original_open = command.open_data
original_start = SaveCheckpoints.on_fit_start


def hang(self: LanguageModeling, batch: Any, batch_index: int) -> Any:
    """Computes a step; the third never ends."""
    while batch_index == 2:
        announce()
        time.sleep(100)
    return original_step(self, batch, batch_index)


def send_repeatedly(self: LanguageModeling, batch: Any, batch_index: int) -> Any:
    """Computes a step; in the third the signal arrives as from the group and from the launcher."""
    if batch_index == 2:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
    return original_step(self, batch, batch_index)


def open_slowly(config: Any) -> Any:
    """Announces the run before it has written anything, and never opens its data."""
    announce()
    time.sleep(100)


def send_and_start(self: SaveCheckpoints, trainer: Any, pl_module: Any) -> None:
    """Sends a signal between Lightning's setup of its handlers and the start of the run."""
    os.kill(os.getpid(), signal.SIGTERM)
    original_start(self, trainer, pl_module)


def two_signals(run_dir: str, *numbers: signal.Signals) -> int:
    """Sends signals to a run that hangs."""
    pid = start(run_dir, "trainer.max_steps=9")
    wait_for_announcement(pid)
    for number in numbers:
        os.kill(pid, number)
        time.sleep(1.2)
    return exit_code_of(pid)


def signal_to_group(run_dir: str, number: signal.Signals) -> int:
    """Sends a signal to a run and its loader workers, as SLURM does."""
    settings = ("trainer.max_steps=100000", "trainer.log_every=1", "data.num_workers=1")
    pid = start(run_dir, *settings)
    wait_for_step(run_dir, 3)
    os.killpg(pid, number)
    return exit_code_of(pid)


def early_signal(number: signal.Signals) -> int:
    """Sends a signal to a run before it has written anything."""
    pid = start("early", "trainer.max_steps=9")
    wait_for_announcement(pid)
    os.kill(pid, number)
    return exit_code_of(pid)


def main() -> None:
    """Sends all signals, each to a run with its own change."""
    codes: dict[str, Any] = {}
    LanguageModeling.training_step = hang
    codes["twice"] = two_signals("twice", signal.SIGTERM, signal.SIGTERM)
    codes["mixed"] = two_signals("mixed", signal.SIGUSR1, signal.SIGINT)
    LanguageModeling.training_step = send_repeatedly
    codes["repeated"] = exit_code_of(start("repeated", "trainer.max_steps=9"))
    LanguageModeling.training_step = original_step
    codes["groups"] = [
        signal_to_group("group-term", signal.SIGTERM),
        signal_to_group("group-usr1", signal.SIGUSR1),
    ]
    command.open_data = open_slowly
    codes["early"] = [
        early_signal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    ]
    command.open_data = original_open
    SaveCheckpoints.on_fit_start = send_and_start
    codes["between"] = exit_code_of(start("between", "trainer.max_steps=9"))
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
