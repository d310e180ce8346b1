"""The LightningModule: one step of training or validation on a batch of tokens."""

import math
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor

from protlm.config import OptimizerConfig, ScheduleConfig
from protlm.data.dataset import Batch
from protlm.errors import TrainingDivergedError
from protlm.model.checkpoint import DESCRIPTION
from protlm.model.objective import target_sums
from protlm.model.transformer import ProteinLM
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
        self._targets = torch.zeros((), dtype=torch.int64)
        self._samples: list[int] = []
        self.gradient_norm = torch.tensor(math.nan)

    def training_step(self, batch: Batch, batch_index: int) -> dict[str, Tensor]:
        """Returns the total loss of the targets, and this rank's sums (nats, correct, count)."""
        # Dropout is a pure function of (seed, position in the data, rank), so that a continued
        # run draws what the uninterrupted one drew; no generator state has to be saved.
        place = np.random.SeedSequence([self._seed, *batch.after, self.global_rank])
        torch.manual_seed(int(place.generate_state(1)[0]))
        logits_BLV = self.network(batch.tokens_BL, batch.mask_BL, causal=self.causal).logits_BLV
        sums = target_sums(logits_BLV, batch.targets_BL)
        self._targets = self._targets + sums.count
        self._samples += batch.samples_B.tolist()
        # A total: DDP averages over ranks and Lightning over accumulated batches, which this
        # undoes; `on_before_optimizer_step` divides by the targets of all of them, once.
        parts = self.trainer.world_size * self.trainer.accumulate_grad_batches
        return {"loss": sums.nats * parts, "sums": sums.stacked().detach()}

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradient by the targets of all ranks and accumulated batches.

        Raises:
            TrainingDivergedError: the gradient is not finite, on all ranks; nothing is stepped.
        """
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        num_targets = self.all_ranks(self._targets).clamp(min=1)
        for gradient in gradients:
            gradient.div_(num_targets)
        self.gradient_norm = torch.nn.utils.get_total_norm(gradients)
        if not torch.isfinite(self.gradient_norm):
            raise TrainingDivergedError(
                f"the gradient of step {self.trainer.global_step + 1} is not finite (samples "
                f"{self._samples[:20]}); the step was not made and the last checkpoint is good: "
                "continue with a lower optimizer.learning_rate in another run_dir="
            )
        self._targets, self._samples = torch.zeros_like(self._targets), []

    def on_train_start(self) -> None:
        """Starts the count of targets."""
        self._targets = torch.zeros((), dtype=torch.int64, device=self.device)

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
