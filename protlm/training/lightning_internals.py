"""The private state of Lightning that training relies on: one function for each, with its reason.

The dependency on Lightning is pinned to one minor version. Before the pin is moved,
`tests/training/test_lightning_internals.py` has to pass with the new version.
"""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import Popen
from typing import Any, NoReturn

import pytorch_lightning as pl
from lightning_fabric.strategies.launchers.subprocess_script import _ChildProcessObserver  # pyright: ignore[reportPrivateUsage]

# Warnings that do not apply here, each with the reason.
_KNOWN_WARNINGS = (
    ".*does not have many workers.*",  # tokens come from a memory map: workers gain nothing
    ".*LeafSpec.*deprecated.*",  # Lightning's own use of torch
    # The next two describe what torch's compiler does to the tensors and functions that it traces.
    "The .grad attribute of a Tensor that is not a leaf Tensor .*",
    ".*autograd.function.Function.* should not be instantiated.*",
    ".*on tasks.*srun.*",  # printed when SLURM is installed but not used
    "You're resuming from a checkpoint that ended before the epoch ended.*",  # resumed exactly
)


def disable_signal_handlers(trainer: pl.Trainer) -> None:
    """Keeps Lightning from installing its signal handlers when fitting starts.

    Its SIGTERM handler broadcasts from within the handler, which deadlocks when other ranks are
    elsewhere (Lightning#20806). Blocking the signal instead is not enough: any other thread
    receives it, and Python runs the handler in the main thread.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None  # pyright: ignore[reportPrivateUsage]


def rescale_batch_counters(checkpoint: dict[str, Any], *, before: int, now: int) -> None:
    """Rescales the saved counters of micro-batches to another number of them per step, in place.

    Lightning counts micro-batches where this package counts optimizer steps.
    """
    counts = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for count in (counts["total"], counts["current"]):
        moved = count["ready"] // before * now - count["ready"]
        for stage in count:
            count[stage] += moved


def drop_validation_counters(checkpoint: dict[str, Any]) -> None:
    """Removes the counters of validation batches: an interrupted validation is repeated."""
    states = checkpoint["loops"]["fit_loop"].items()
    checkpoint["loops"] = {"fit_loop": {key: x for key, x in states if ".val_loop." not in key}}


def set_last_step(trainer: pl.Trainer, step: int) -> None:
    """Sets the step after which the training loop ends.

    Lightning does not start a run that has completed its last step, even if its last validation
    is missing.
    """
    trainer.fit_loop.epoch_loop.max_steps = step


def validate_now(trainer: pl.Trainer) -> None:
    """Runs a validation, as Lightning does between two steps."""
    trainer.validating = True
    trainer.fit_loop.epoch_loop.val_loop.run()
    trainer.training = True


def validate_after_this_batch(trainer: pl.Trainer) -> None:
    """Makes Lightning validate after the present micro-batch, whatever the interval."""
    trainer.val_check_batch = 1


def end_validation() -> NoReturn:
    """Ends the loop over the validation batches early, from within a callback."""
    raise StopIteration


@contextmanager
def quiet_and_interruptible() -> Iterator[None]:
    """Silences the warnings that do not apply, and turns Lightning's exit into an interrupt."""
    with warnings.catch_warnings():
        for message in _KNOWN_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        try:
            yield
        except SystemExit:
            raise KeyboardInterrupt from None


def end_with_exit_code_of_ranks() -> None:
    """Makes rank 0 end with the exit code of a rank that it started and that failed.

    Lightning ends rank 0 with SIGKILL and without a message, which looks like a lack of memory.
    """
    setattr(_ChildProcessObserver, "_terminate_all", _end_with_exit_code)  # noqa: B010


def _end_with_exit_code(observer: _ChildProcessObserver) -> None:
    ranks: list[Popen[bytes]] = observer._child_processes  # pyright: ignore[reportPrivateUsage]
    rank, code = next((n, p.returncode) for n, p in enumerate(ranks, start=1) if p.returncode)
    # A process that was ended by signal N has the code -N here and 128 + N in a shell.
    code = 128 - code if code < 0 else code
    print(f"rank {rank} ended with exit code {code}; stopping all ranks", file=sys.stderr)
    for process in ranks:
        process.kill()
    # The main thread may wait for the lost rank in a collective.
    os._exit(code)
