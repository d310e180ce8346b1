"""Preemption: a signal to any rank ends the run on all ranks after the same optimizer step."""

import os
import signal
import sys
import threading
import time
from contextlib import ExitStack, suppress
from types import FrameType
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer

from protlm.system.errors import ExitCode
from protlm.system.interruption import handled
from protlm.training.callbacks.hooks import LoopCallback
from protlm.training.launch import SIGNALS, is_first_rank
from protlm.training.lightning_internals import disable_signal_handlers, end_validation
from protlm.training.module import Training

# A signal within this time after the first is the same one: launchers forward what the whole
# process group has already received.
_ECHO_SECONDS = 1.0
_TOLD = b"\nprotlm: stopping after this step, with a checkpoint; a second signal stops at once\n"
# Validation batches between two agreements of the ranks: few enough for a prompt stop.
VALIDATION_BATCHES = 10


class StopOnSignal(LoopCallback):
    """Stops a run cleanly at a preemption signal or Ctrl-C on any rank.

    The handler only records the signal. At the end of each optimizer step, and every few batches
    of a validation, the ranks agree by a reduction, so that all of them stop after the same step.
    An incomplete validation is repeated by the resumed run. A second signal ends a process
    immediately, even one that waits for another rank.
    """

    def __init__(self) -> None:
        self.received = 0
        # Separate from `received`: a signal that arrives during an agreement must not be lost.
        self._noted = 0
        self._handlers = ExitStack()

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.INTERRUPTED if self.received == signal.SIGINT else ExitCode.PREEMPTED

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Installs the handlers, and keeps Lightning from installing its own after them."""
        disable_signal_handlers(trainer)
        arrivals, pipe = os.pipe()
        self._handlers.callback(os.close, pipe)
        os.set_blocking(pipe, False)
        threading.Thread(target=_abort_at_the_second, args=(arrivals,), daemon=True).start()
        signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
        self._handlers.callback(signal.set_wakeup_fd, -1)
        self._handlers.enter_context(handled(SIGNALS, self._note))

    def on_step_end(self, trainer: Trainer, module: Training, batch: Any) -> None:
        self._agree(trainer)

    def on_validated_batch(self, trainer: Trainer, number: int) -> None:
        """Makes the ranks agree every few batches, and leaves the validation if they stop."""
        if number % VALIDATION_BATCHES == 0:
            self._agree(trainer)
            if self.received:
                end_validation()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._handlers.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._handlers.close()

    def _agree(self, trainer: Trainer) -> None:
        mine = torch.tensor(self._noted, device=trainer.strategy.root_device)
        self.received = int(trainer.strategy.reduce(mine, reduce_op="max"))
        if self.received:
            trainer.should_stop = True
            # Lightning validates whenever a run stops, which may take long.
            trainer.limit_val_batches = 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = self._noted or number


def _abort_at_the_second(arrivals: int) -> None:
    """Ends the process at the second signal; reads the numbers of the signals from a pipe.

    Runs in a thread, because Python's handlers run only when the main thread returns from a
    collective.
    """
    first: float | None = None
    while number := os.read(arrivals, 1):
        now = time.monotonic()
        if number[0] not in SIGNALS:
            continue
        if first is None:
            first = now
            if is_first_rank():
                with suppress(OSError):
                    os.write(sys.stderr.fileno(), _TOLD)
        elif now - first > _ECHO_SECONDS:
            # The exit code that a shell reports for a process that a signal ended.
            os._exit(128 + number[0])
    os.close(arrivals)
