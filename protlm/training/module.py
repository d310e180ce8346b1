"""The LightningModule: one step of training or validation on a batch of tokens."""

import math
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from protlm.config import OptimizerConfig, ScheduleConfig
from protlm.data.dataset import Batch
from protlm.model.checkpoint import DESCRIPTION
from protlm.model.objective import target_sums
from protlm.model.transformer import ProteinLM
from protlm.training.optimization import build_optimizer
from protlm.training.schedule import rate_factor
from protlm.training.sharding import shard


class LanguageModeling(pl.LightningModule):
    """Trains a network on its objective.

    Args:
        network: the model.
        description: plain values that rebuild the model; they stand in every checkpoint.
        causal: whether positions see only those before them.
        optimizer: its settings.
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
        # A step with a larger gradient norm is left out.
        self.largest_norm = math.inf
        self.gradient_norm = torch.tensor(math.nan)
        self.num_bad_losses = 0
        self.is_left_out = False

    def configure_model(self) -> None:
        """Shards the network where the strategy has devices to shard it over."""
        if self.device_mesh is not None:
            shard(self.network, self.device_mesh["data_parallel"])

    def training_step(self, batch: Batch, batch_index: int) -> dict[str, Tensor]:
        """Returns the total loss of the targets, and this rank's sums (nats, correct, count)."""
        # Dropout is a pure function of (seed, position in the data, slice of the batch), so that a
        # continued run draws what the uninterrupted one drew; no generator state has to be saved.
        place = np.random.SeedSequence([self._seed, *batch.after, batch.slice])
        torch.manual_seed(int(place.generate_state(1)[0]))
        logits_BLV = self.network(batch.tokens_BL, batch.mask_BL, causal=self.causal).logits_BLV
        sums = target_sums(logits_BLV, batch.targets_BL)
        is_finite = sums.nats.detach().isfinite()
        self._counts += torch.stack([sums.count, ~is_finite])
        # A total: DDP averages over ranks and Lightning over accumulated batches, which this
        # undoes; `on_before_optimizer_step` divides by the targets of all of them, once.
        parts = self.trainer.world_size * self.trainer.accumulate_grad_batches
        # What is left out of the training is left out of its mean loss.
        logged = torch.where(is_finite, sums.stacked().detach(), 0)
        return {"loss": sums.nats * parts, "sums": logged, "is_finite": is_finite}

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradient by the targets of all ranks and accumulated batches.

        A step is left out, on all ranks alike, if the loss of any rank or the gradient is not
        finite or the gradient's norm is more than `largest_norm`: no parameter then has a gradient,
        and optimisers leave such parameters, and what they know of them, as they are.
        """
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        num_targets, num_bad_losses = self.all_ranks(self._counts)
        self._counts.zero_()
        for gradient in gradients:
            gradient.div_(num_targets.clamp(min=1))
        norm = torch.nn.utils.get_total_norm(gradients)
        self.gradient_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        norm, num_bad_losses = torch.stack([self.gradient_norm, num_bad_losses]).tolist()
        self.num_bad_losses = int(num_bad_losses)
        self.is_left_out = self.num_bad_losses > 0 or not norm < self.largest_norm
        if self.is_left_out:
            optimizer.zero_grad(set_to_none=True)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Scales a gradient down to the norm that is allowed; its own is known already."""
        if gradient_clip_val:
            parameters = [p for p in self.parameters() if p.grad is not None]
            torch.nn.utils.clip_grads_with_norm_(parameters, gradient_clip_val, self.gradient_norm)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """The rate is a function of the steps that were made."""
        if not self.is_left_out:
            super().lr_scheduler_step(scheduler, metric)

    def on_train_start(self) -> None:
        """Starts the counts of targets and of losses that are not finite."""
        self._counts = torch.zeros(2, dtype=torch.int64, device=self.device)

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
        """The optimiser, and a rate that is a function of the optimiser step."""
        optimizer = build_optimizer(self.network, self._optimizer)
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
