"""Watches how near to 0 the denominators of a run's Performers come."""

import math
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from protlm.attention.performer.base import Performer
from protlm.data.dataset import FILLER, Batch
from protlm.model.transformer import ProteinLM

COLUMN = "smallest_denominator"
# So many positions of a batch are looked at, or one sequence if it is longer: to look at all takes
# as long as the forward pass of the layer, a percent of a run.
_POSITIONS = 1024


class WatchDenominators(Callback):
    """Logs the smallest denominator of all Performers, whatever their kernel.

    The first sequences of the last batch before a log are looked at, by hooks that exist for its
    forward pass only, on all ranks; other batches cost nothing. A denominator that falls by orders
    of magnitude from log to log tells of a feature map that has lost the keys, before gradients do.

    Args:
        network: the model.
        every: optimiser steps between two logs.
    """

    def __init__(self, network: ProteinLM, *, every: int) -> None:
        self._performers = [
            part
            for part in network.modules()
            if isinstance(part, Performer) and part.has_denominators
        ]
        self._every = every
        self._hooks: list[RemovableHandle] = []
        self._smallest: list[Tensor] = []

    @property
    def columns(self) -> tuple[str, ...]:
        """The names under which this is logged."""
        return (COLUMN,) if self._performers else ()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Hooks the Performers where a log is due when this batch is done."""
        steps = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if steps and (trainer.global_step + 1) % self._every == 0:
            mask_BL = batch.mask_BL & (batch.samples_B != FILLER)[:, None]
            mask_BL = mask_BL[: max(_POSITIONS // mask_BL.shape[1], 1)]
            self._hooks = [self._look_once(performer, mask_BL) for performer in self._performers]

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Logs what was seen."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if not self._smallest:
            return
        smallest = trainer.strategy.reduce(torch.stack(self._smallest).amin(), reduce_op="min")
        self._smallest = []
        for logger in trainer.loggers:
            logger.log_metrics({COLUMN: float(smallest)}, trainer.global_step)

    def _look_once(self, performer: Performer, mask_BL: Tensor) -> RemovableHandle:
        def look(_: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Any]) -> None:
            # Activation checkpointing runs the layer again in the backward pass: once is enough.
            hook.remove()
            first = slice(len(mask_BL))
            q_BHLK, k_BHLK = (x_BHLK[first] for x_BHLK in inputs[:2])
            sums_BHL1 = performer.denominators(
                q_BHLK, k_BHLK, mask_BL=named["mask_BL"][first], causal=named["causal"]
            )
            is_hidden_B1L1 = ~mask_BL[:, None, :, None]
            self._smallest.append(sums_BHL1.masked_fill(is_hidden_B1L1, math.inf).amin())

        hook = performer.register_forward_pre_hook(look, with_kwargs=True)
        return hook
