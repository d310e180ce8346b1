"""A rank of runs, for the programs of `run_ranks`: importing this leaves the others at exit."""

import atexit
import os
import sys
from typing import Any

import protlm.commands.train as command
from protlm.config import TrainConfig
from protlm.config.composition import compose
from protlm.training.launch import leave_other_ranks
from protlm.training.run import Finished

RANK = int(os.environ["RANK"])
atexit.register(leave_other_ranks)


def train(run_dir: str, *settings: str) -> tuple[int, int]:
    """Trains with the arguments of this process and further settings.

    Returns the step and the exit code that the run ended with.
    """
    ended: list[Finished] = []
    run = command.run

    def note(*inputs: Any, **named: Any) -> Finished:
        ended.append(run(*inputs, **named))
        return ended[0]

    command.run = note
    try:
        command.train(compose(TrainConfig, [*sys.argv[1:], f"run_dir={run_dir}", *settings]))
    except SystemExit:
        pass
    finally:
        command.run = run
    return ended[0].step, int(ended[0].exit_code)
