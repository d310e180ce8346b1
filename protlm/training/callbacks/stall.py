"""A watchdog for ranks that wait for each other."""

import faulthandler
from typing import Any

from pytorch_lightning import LightningModule, Trainer

from protlm.training.callbacks.hooks import LoopCallback

# The fraction of the time-out after which the stacks are written, well before a rank gives up.
_STACKS_AT = 0.5
_APART_SECONDS = 0.25


class StallWatchdog(LoopCallback):
    """Writes the stacks of all threads if a rank completes no step for half of the time-out.

    All ranks do so: the log shows which rank is stuck and where, and where the others wait for it.
    Crashes in native code, such as an abort of NCCL, are reported in the same way.
    """

    def __init__(self, *, timeout_minutes: float) -> None:
        self._seconds = timeout_minutes * 60 * _STACKS_AT

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size > 1:
            faulthandler.enable()
            self._restart(trainer)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._restart(trainer)

    def on_validated_batch(self, trainer: Trainer, number: int) -> None:
        self._restart(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._stop(trainer)

    def _restart(self, trainer: Trainer) -> None:
        if trainer.world_size > 1:
            # The ranks of a machine write one after another, so that stacks are not interleaved.
            wait = self._seconds + min(_APART_SECONDS * trainer.local_rank, self._seconds / 2)
            faulthandler.dump_traceback_later(wait)

    def _stop(self, trainer: Trainer) -> None:
        if trainer.world_size > 1:
            faulthandler.cancel_dump_traceback_later()
