"""Preemption: a signal to any rank ends the run on all ranks after the same optimiser step."""

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback

from protlm.data.dataset import Batch
from protlm.errors import ExitCode

# What schedulers send before they take a machine away: SIGTERM, `--signal=USR1@120` of SLURM, and
# submitit's SIGUSR2.
PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
SIGNALS = (signal.SIGINT, *PREEMPTION_SIGNALS)

# Signals that come so soon after the first are the same one: launchers pass on what the whole
# process group got already.
_ECHO_SECONDS = 1.0
# Validation batches between two reductions: few enough for a prompt stop.
VALIDATION_BATCHES = 10


class StopOnSignal(Callback):
    """Ends a run early but in order, at a preemption signal or Ctrl-C on any rank.

    The handler only takes a note. At the end of each optimiser step, and now and then in a
    validation, the ranks agree by a reduction, so that all of them stop after the same step; a
    validation that is not complete is left to the continued run. A second signal ends a process
    at once, as if the first had not been caught, even one that waits for another rank.

    `received` is the signal's number, on every rank, or 0.
    """

    def __init__(self) -> None:
        self.received = 0
        # Apart from `received`: a signal that comes while the ranks agree must not be overwritten.
        self._noted = 0
        self._signals_pipe: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> ExitCode:
        """What the process ends with."""
        return ExitCode.INTERRUPTED if self.received == signal.SIGINT else ExitCode.PREEMPTED

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes the signals over, and keeps Lightning, which would do so next, from it.

        Its handler of SIGTERM broadcasts from within the handler, and so waits for ever for ranks
        that are elsewhere (Lightning#20806). To block the signal until ours are in place is not
        enough: any other thread takes it, and Python runs the handler in the main thread.
        """
        connector = trainer._signal_connector  # pyright: ignore[reportPrivateUsage]
        connector.register_signal_handlers = lambda: None
        arrivals, self._signals_pipe = os.pipe()
        os.set_blocking(self._signals_pipe, False)
        threading.Thread(target=_abort_at_the_second, args=(arrivals,), daemon=True).start()
        signal.set_wakeup_fd(self._signals_pipe, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Lets the ranks agree, at an optimiser step's end only."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self._agree(trainer, pl_module)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Lets the ranks agree now and then, and leaves the validation when they are to stop."""
        if (batch_idx + 1) % VALIDATION_BATCHES == 0:
            self._agree(trainer, pl_module)
            if self.received:
                # What ends Lightning's loop over the batches, wherever it is raised.
                raise StopIteration

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Gives the signals back, when the last checkpoint is saved."""
        self._let_go()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Gives the signals back."""
        self._let_go()

    def _agree(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        mine = torch.tensor(self._noted, device=pl_module.device)
        self.received = int(trainer.strategy.reduce(mine, reduce_op="max"))
        if self.received:
            trainer.should_stop = True
            # Lightning validates whenever a run stops, however long that takes.
            trainer.limit_val_batches = 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = self._noted or number

    def _let_go(self) -> None:
        if self._signals_pipe is not None:
            for number, handler in self._before.items():
                # None is one that was not set from Python, and cannot be set from there.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            signal.set_wakeup_fd(-1)
            os.close(self._signals_pipe)
            self._signals_pipe = None


def _abort_at_the_second(arrivals: int) -> None:
    """Ends the process at the second signal; the numbers of all come through a pipe.

    A thread, because Python's handlers wait until the main thread is back from a collective.
    """
    first: float | None = None
    while number := os.read(arrivals, 1):
        now = time.monotonic()
        if number[0] not in SIGNALS:
            continue
        if first is None:
            first = now
        elif now - first > _ECHO_SECONDS:
            # The exit code that a shell shows for a process that a signal ended.
            os._exit(128 + number[0])
    os.close(arrivals)
