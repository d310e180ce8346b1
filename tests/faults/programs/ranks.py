"""Ranks of runs with faults, forked from one process that imports everything once.

Each line of the standard input is a request: the FOLDER of the runs, the FAULT, which is a function
in `FAULTS`, its ARGUMENTS, the SETTINGS, and the ENVIRONMENTS of the ranks. The answers are a line
of the process IDs and, when all have ended, a line of the exit codes. Each rank writes what came of
the fault to `rank-RANK.json` and its messages to `rank-RANK.log`. With settings as arguments the
program is a rank that Lightning's launcher starts, of which one stalls: the one of STALLED.
"""

import json
import math
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor

import protlm.commands.train as command
from protlm.attention.ops.projection import Projection
from protlm.checkpoints import format as checkpoints
from protlm.config import TrainConfig
from protlm.config.composition import compose
from protlm.system.errors import OutputError, UserError
from protlm.train import end_with_parent
from protlm.training.callbacks.hooks import CheckSameStep
from protlm.training.callbacks.save_checkpoints import SaveCheckpoints
from protlm.training.datamodule import SequenceData
from protlm.training.launch import leave_other_ranks
from protlm.training.module import LanguageModeling
from tests.fixtures.calls import watched

# Of this rank, once it is forked.
ARGUMENTS: list[Any] = []
RANK = 0
training_step = LanguageModeling.training_step
SHORT = ("trainer.max_steps=4", "trainer.checkpoint_every=1", "trainer.valid_every=9")


def train(run_dir: str, *settings: str) -> tuple[int, int]:
    """Trains; returns the step and the exit code that the run ended with."""
    ended: list[tuple[int, int]] = []
    run = command.run

    def note(*inputs: Any, **named: Any) -> tuple[int, int]:
        ended.append(run(*inputs, **named))
        return ended[0]

    command.run = note
    try:
        command.train(compose(TrainConfig, [*sys.argv[1:], f"run_dir={run_dir}", *settings]))
    except SystemExit:
        pass
    finally:
        command.run = run
    return ended[0][0], int(ended[0][1])


def start_apart() -> None:
    """Starts the second rank more than a second after the first."""
    time.sleep(1.3 * RANK)
    train("run")


def change_directory() -> Any:
    """Resumes a run whose directory rank 1 does not see; returns the error."""
    train("run", "trainer.max_steps=2")
    if RANK == 1:
        Path("elsewhere").mkdir()
        os.chdir("elsewhere")
    try:
        return train("run", "trainer.max_steps=4")
    except UserError as error:
        return str(error)


def differing_projections() -> Any:
    """Draws other projections on each rank; returns sums of buffers before and after."""
    draw, sums = Projection.draw, list[list[float]]()

    def draw_differently(self: Projection, seed: int, index: int) -> Tensor:
        return draw(self, seed, index) + RANK

    def record(self: LanguageModeling) -> None:
        sums.append([float(buffer.double().sum()) for buffer in self.network.buffers()])

    def setup(self: CheckSameStep, trainer: Any, pl_module: Any, stage: str) -> None:
        record(pl_module)

    Projection.draw = draw_differently
    CheckSameStep.setup = setup
    LanguageModeling.on_train_end = record
    train("run", "attention=performer_softmax", "trainer.max_steps=3")
    return sums


def nan_on_rank_1() -> Any:
    """Makes the bias NaN in the third step of rank 1; returns the samples of that batch."""
    samples = []

    def step(self: LanguageModeling, batch: Any, batch_index: int) -> Any:
        if batch_index != 2 or RANK != 1:
            return training_step(self, batch, batch_index)
        assert self.network.head is not None
        bias = self.network.head.bias
        kept = bias.data.clone()
        bias.data.fill_(math.nan)
        out = training_step(self, batch, batch_index)
        bias.data.copy_(kept)
        samples.extend(n for n in batch.samples_B.tolist() if n >= 0)
        return out

    LanguageModeling.training_step = step
    settings = ("trainer.checkpoint_every=1", "trainer.keep_checkpoints=9", "trainer.log_every=1")
    assert train("run", *settings, "trainer.max_steps=5") == (5, 0)
    return samples


def signals_at_random() -> Any:
    """Sends signals to ranks, and resumes the run each time; returns all ends and a whole run's.

    The ranks draw the same moments: a while after the first step of each start, wherever they are
    by then.
    """
    (turns,), rng, ended = ARGUMENTS, random.Random(0), list[tuple[int, int]]()
    first, wait, numbers = 0, 0.0, dict[int, signal.Signals]()

    def send(module: LanguageModeling, *_: Any) -> None:
        if module.trainer.global_step == first and RANK in numbers:
            threading.Timer(wait, os.kill, [os.getpid(), numbers[RANK]]).start()

    LanguageModeling.training_step = watched(training_step, send)
    settings = ("trainer.valid_every=7", "trainer.log_every=5", "trainer.keep_checkpoints=500")
    for turn in range(turns):
        number = rng.choice((signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2))
        numbers = dict.fromkeys([[0], [1], [0, 1]][turn % 3], number)
        wait = rng.uniform(0, 0.2)
        ended.append(train("run", *settings, "trainer.max_steps=1000000"))
        first = ended[-1][0]
    numbers = {}
    return ended, train("whole", *settings, f"trainer.max_steps={first}")


def send_sigterm(*_: Any) -> None:
    """Sends SIGTERM to this process."""
    os.kill(os.getpid(), signal.SIGTERM)


def signal_while_starting() -> Any:
    """Sends SIGTERM to rank 1 while its loaders start; returns how the run ended."""
    if RANK == 1:
        SequenceData.train_dataloader = watched(SequenceData.train_dataloader, send_sigterm)
    return train("run", "trainer.max_steps=9", "trainer.timeout_minutes=0.5")


def announce_and_sleep(*_: Any) -> Any:
    """Makes the file `announced`, and continues only by a signal."""
    Path("announced").touch()
    time.sleep(100)


def hang() -> None:
    """Begins a step that never ends, the third."""

    def wait(_: LanguageModeling, batch: Any, batch_index: int) -> None:
        while batch_index == 2:
            announce_and_sleep()

    LanguageModeling.training_step = watched(training_step, wait)
    command.main()


def signal_repeatedly() -> None:
    """Sends signals in the third step, as the process group and the launcher do."""

    def send(_: LanguageModeling, batch: Any, batch_index: int) -> None:
        if batch_index == 2:
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
                os.kill(os.getpid(), number)

    LanguageModeling.training_step = watched(training_step, send)
    command.main()


def open_slowly() -> None:
    """Has written nothing yet, and never opens its data."""
    command.build_data = announce_and_sleep
    command.main()


def signal_before_the_start() -> None:
    """Sends a signal between Lightning's setup of its handlers and the start of the run."""
    SaveCheckpoints.on_fit_start = watched(SaveCheckpoints.on_fit_start, send_sigterm)
    command.main()


class Killed(BaseException):
    """Represents a kill: nothing that follows is done."""


def interrupted(
    run: str, settings: Sequence[str], *, killed: int | None = None, full: int | None = None
) -> Any:
    """Trains until it is killed after a step, or has no space for a checkpoint.

    Returns how the run ended: None if it was killed.
    """
    end, save = SaveCheckpoints.on_train_batch_end, checkpoints.save

    def die(_: SaveCheckpoints, trainer: Any, *rest: Any) -> None:
        if trainer.global_step == killed:
            raise Killed

    def fail(contents: dict[Any, Any], path: Path) -> None:
        if contents["global_step"] == full:
            path.write_bytes(b"a part of it")
            raise OSError(28, "No space left on device")

    SaveCheckpoints.on_train_batch_end = watched(end, die, after=True)
    checkpoints.save = watched(save, fail)
    try:
        return train(run, *settings)
    except Killed:
        return None
    except OutputError as error:
        return str(error), int(error.exit_code)
    finally:
        SaveCheckpoints.on_train_batch_end, checkpoints.save = end, save


def interruptions() -> Any:
    """Interrupts runs in many ways: the arguments are STEPS, MOVED_AT, HARD and PLAIN settings.

    `whole` is not interrupted, `killed` is killed after each of its steps; `one-to-two` exists;
    `two-to-others` is killed after step MOVED_AT. The disk is full in the other three, whose ends
    are returned.
    """
    steps, moved_at, hard, plain = ARGUMENTS
    interrupted("whole", hard)
    for step in range(1, steps + 1):
        interrupted("killed", hard, killed=step)
    interrupted("killed", hard)
    interrupted("one-to-two", plain)
    interrupted("two-to-others", plain, killed=moved_at)
    return [
        interrupted("warned", SHORT, full=2),
        interrupted("stopped", [*SHORT, "trainer.on_save_error=stop"], full=2),
        interrupted("at-the-end", SHORT, full=4),
    ]


def resume_two_to_four() -> None:
    """Resumes the run `two-to-four` on other ranks."""
    interrupted("two-to-four", [])


def stalled_rank(stalled: int) -> None:
    """Under Lightning's launcher, stops a rank in its fourth step for longer than the time-out."""

    def wait(_: DDPStrategy) -> None:
        # The time-out applies from the start of the run.
        if os.environ.get("LOCAL_RANK", "0") == "1":
            Path(f"ready-{stalled}").touch()
        while not Path(f"ready-{stalled}").exists():
            time.sleep(0.05)

    def stall(module: LanguageModeling, batch: Any, batch_index: int) -> None:
        if batch_index == 3 and module.global_rank == stalled:
            Path(f"stalled-{stalled}").write_text(str(os.getpid()))
            time.sleep(1000)

    end_with_parent()
    DDPStrategy.setup_environment = watched(DDPStrategy.setup_environment, wait)
    LanguageModeling.training_step = watched(training_step, stall)
    command.main()


FAULTS: dict[str, Callable[[], Any]] = {
    "none": command.main,
    "start-apart": start_apart,
    "change-directory": change_directory,
    "differing-projections": differing_projections,
    "nan-on-rank-1": nan_on_rank_1,
    "signals-at-random": signals_at_random,
    "signal-while-starting": signal_while_starting,
    "hang": hang,
    "signal-repeatedly": signal_repeatedly,
    "open-slowly": open_slowly,
    "signal-before-the-start": signal_before_the_start,
    "interruptions": interruptions,
    "resume-two-to-four": resume_two_to_four,
}


def start(request: dict[str, Any], environment: dict[str, str]) -> int:
    """Forks a rank in a session of its own; returns its process ID."""
    global ARGUMENTS, RANK
    if pid := os.fork():
        return pid
    code = 0
    try:
        os.setsid()
        os.chdir(request["folder"])
        os.environ.update(environment)
        sys.argv[1:], ARGUMENTS = request["settings"], request["arguments"]
        RANK = int(environment.get("RANK", "0"))
        rank_zero_only.rank = RANK  # pyright: ignore[reportFunctionMemberAccess]
        for number, path in ((1, os.devnull), (2, f"rank-{RANK}.log")):
            os.dup2(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        told = FAULTS[request["fault"]]()
        Path(request["folder"], f"rank-{RANK}.json").write_text(json.dumps(told))
        leave_other_ranks()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


def serve() -> None:
    """Answers each request."""
    for line in sys.stdin:
        request = json.loads(line)
        ranks = [start(request, environment) for environment in request["environments"]]
        print(json.dumps(ranks), flush=True)
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        stalled_rank(int(os.environ["STALLED"]))
    else:
        serve()
