"""The LightningModule: one step of training or validation on a batch of tokens."""

from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor

from protlm.config import OptimizerConfig, ScheduleConfig
from protlm.data.dataset import Batch
from protlm.model.checkpoint import DESCRIPTION
from protlm.model.transformer import ProteinLM
from protlm.training.objective import target_sums
from protlm.training.optimization import adamw, rate_factor


class LanguageModeling(pl.LightningModule):
    """Trains a network on its objective.

    Args:
        network: the model.
        description: plain values that rebuild the model; they stand in every checkpoint.
        causal: whether positions see only those before them.
        optimizer: AdamW's settings.
        schedule: warm-up and decay.
        max_steps: optimiser steps of the whole run.
        seed: what dropout is drawn from, with the batch and the rank.
    """

    def __init__(
        self,
        network: ProteinLM,
        *,
        description: dict[str, Any],
        causal: bool,
        optimizer: OptimizerConfig,
        schedule: ScheduleConfig,
        max_steps: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.network = network
        self.description = description
        self.causal = causal
        self._optimizer = optimizer
        self._schedule = schedule
        self._max_steps = max_steps
        self._seed = seed

    def training_step(self, batch: Batch, batch_index: int) -> dict[str, Tensor]:
        """Returns the loss per target, and this rank's sums (nats, correct, count)."""
        # Dropout is a pure function of (seed, position in the data, rank), so that a continued
        # run draws what the uninterrupted one drew; no generator state has to be saved.
        place = np.random.SeedSequence([self._seed, *batch.after, self.global_rank])
        torch.manual_seed(int(place.generate_state(1)[0]))
        logits_BLV = self.network(batch.tokens_BL, batch.mask_BL, causal=self.causal).logits_BLV
        sums = target_sums(logits_BLV, batch.targets_BL)
        count = self.all_ranks(sums.count)
        # DDP averages gradients over ranks; with this factor they are those of the whole batch.
        loss = sums.nats * self.trainer.world_size / count.clamp(min=1)
        return {"loss": loss, "sums": sums.stacked().detach()}

    def on_validation_epoch_start(self) -> None:
        """Starts the sums over the validation split."""
        self._validation = torch.zeros(3, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: Batch, batch_index: int) -> None:
        """Adds a batch to the sums."""
        logits_BLV = self.network(batch.tokens_BL, batch.mask_BL, causal=self.causal).logits_BLV
        self._validation += target_sums(logits_BLV, batch.targets_BL).stacked()

    def validation_sums(self) -> tuple[float, float, float]:
        """Nats, correct and count over all batches and ranks of the last validation."""
        nats, correct, count = self.all_ranks(self._validation).tolist()
        return nats, correct, count

    def all_ranks(self, value: Tensor) -> Tensor:
        """The sum of `value` over the ranks."""
        return self.trainer.strategy.reduce(value.detach().clone(), reduce_op="sum")

    def configure_optimizers(self) -> Any:
        """AdamW, and a rate that is a function of the optimiser step."""
        optimizer = adamw(self.network, self._optimizer)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: rate_factor(step, self._schedule, max_steps=self._max_steps),
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Writes what rebuilds the model beside its weights."""
        checkpoint[DESCRIPTION] = self.description
