"""What is learned: a step of any objective, and language modeling."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from protlm.checkpoints.description import ModelDescription
from protlm.checkpoints.format import DESCRIPTION
from protlm.config import OptimizerConfig, ScheduleConfig, TrainConfig
from protlm.data.dataset import Batch
from protlm.data.masking import IGNORE
from protlm.model.objective import TargetSums, perplexity, residues_only, target_sums
from protlm.model.transformer import ProteinLM
from protlm.training.datamodule import SequenceData
from protlm.training.optimization import build_optimizer
from protlm.training.schedule import rate_factor


class Training(pl.LightningModule, ABC):
    """Trains a network: the loss of a step is a total, divided once by all of its targets."""

    # Whether the weights that a run starts from are validated and saved as its step 0.
    keeps_start: ClassVar[bool] = False
    # Whether the loss depends on all parameters.
    uses_all_parameters: ClassVar[bool] = True

    def __init__(
        self, network: ProteinLM, *, schedule: ScheduleConfig, max_steps: int, seed: int
    ) -> None:
        super().__init__()
        self.network = network
        self._schedule, self._max_steps, self._seed = schedule, max_steps, seed
        # A step with a larger gradient norm is skipped.
        self.largest_norm = math.inf
        self.gradient_norm = torch.tensor(math.nan)
        self.num_bad_losses = 0
        self.is_skipped = False

    @abstractmethod
    def _losses(self, batch: Any) -> tuple[Tensor, TargetSums]:
        """Returns the total loss of the targets, and the sums for the log."""

    @abstractmethod
    def _place(self, batch: Any) -> tuple[int, ...]:
        """Returns the place of a batch in the run, and of this rank's rows in it."""

    @abstractmethod
    def make_optimizer(self) -> torch.optim.Optimizer:
        """Returns the optimizer, with its peak learning rate."""

    def check_start(self, config: TrainConfig) -> None:
        """Rejects initial weights that this training cannot start from; here, none."""

    def check_continues(self, checkpoint: Mapping[str, Any]) -> None:
        """Rejects a checkpoint of another training; here, none."""

    def training_step(self, batch: Any, batch_index: int) -> dict[str, Tensor]:
        """Returns the total loss of the targets, and this rank's sums (nats, correct, count)."""
        # Dropout is a pure function of (seed, position in the data, micro-batch). A resumed
        # run thus draws the same numbers without a saved generator state.
        place = np.random.SeedSequence([self._seed, *self._place(batch)])
        torch.manual_seed(int(place.generate_state(1)[0]))
        loss, sums = self._losses(batch)
        is_finite = loss.detach().isfinite()
        self._counts += torch.stack([sums.count, ~is_finite])
        # The loss is a total. The factor undoes the averages of DDP over ranks and of Lightning
        # over accumulated batches; `on_before_optimizer_step` divides once by all targets.
        parts = self.trainer.world_size * self.trainer.accumulate_grad_batches
        # Losses that are not finite are excluded from the logged mean.
        logged = torch.where(is_finite, sums.stacked().detach(), 0)
        return {"loss": loss * parts, "sums": logged, "is_finite": is_finite}

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradient by the targets of all ranks and accumulated batches.

        A step is skipped on all ranks if the loss of any rank or the gradient is not finite, or if
        the gradient norm exceeds `largest_norm`. Gradients are then set to None: optimizers change
        neither parameters without a gradient nor their state.
        """
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        num_targets, num_bad_losses = self.all_ranks(self._counts)
        self._counts.zero_()
        for gradient in gradients:
            gradient.div_(num_targets.clamp(min=1))
        self.gradient_norm = torch.nn.utils.get_total_norm(gradients)
        norm, num_bad_losses = torch.stack([self.gradient_norm, num_bad_losses]).tolist()
        self.num_bad_losses = int(num_bad_losses)
        self.is_skipped = self.num_bad_losses > 0 or not norm < self.largest_norm
        if self.is_skipped:
            optimizer.zero_grad(set_to_none=True)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips the gradient to the allowed norm, using the norm computed before."""
        if gradient_clip_val:
            torch.nn.utils.clip_grads_with_norm_(
                self.parameters(), gradient_clip_val, self.gradient_norm
            )

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if not self.is_skipped:
            super().lr_scheduler_step(scheduler, metric)

    def on_train_start(self) -> None:
        """Starts the counts of targets and of bad losses, and sets the rate of the next step.

        A checkpoint has the rate for the `max_steps` of its time.
        """
        scheduler, optimizer = self.lr_schedulers(), self.optimizers(use_pl_optimizer=False)
        assert isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR)
        assert isinstance(optimizer, torch.optim.Optimizer)
        before = optimizer.param_groups[0]["lr"]
        parts = zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        for group, peak, factor in parts:
            group["lr"] = peak * factor(scheduler.last_epoch)
        now = optimizer.param_groups[0]["lr"]
        if not math.isclose(before, now) and self.trainer.is_global_zero:
            warnings.warn(
                f"after step {self.trainer.global_step} the learning rate goes from {before:.3g} "
                f"to {now:.3g}, because trainer.max_steps is no longer what it was",
                stacklevel=2,
            )
        self._counts = torch.zeros(2, dtype=torch.int64, device=self.device)

    def all_ranks(self, value: Tensor) -> Tensor:
        """Returns the sum of `value` over the ranks."""
        return self.trainer.strategy.reduce(value.detach().clone(), reduce_op="sum")

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer()
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: rate_factor(step, self._schedule, max_steps=self._max_steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def data_of(trainer: pl.Trainer) -> SequenceData:
    """Returns the data of a trainer of language modeling."""
    data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(data, SequenceData)
    return data


class LanguageModeling(Training):
    """Trains a network to predict masked or next residues."""

    def __init__(
        self,
        network: ProteinLM,
        *,
        description: ModelDescription,
        causal: bool,
        optimizer: OptimizerConfig,
        schedule: ScheduleConfig,
        max_steps: int,
        seed: int,
    ) -> None:
        super().__init__(network, schedule=schedule, max_steps=max_steps, seed=seed)
        self.description, self.causal = description, causal
        self._optimizer = optimizer
        # Log-probabilities by input and target. Not a buffer, which would be saved as a weight.
        self._unigram_VV = torch.empty(0, 0)

    def _place(self, batch: Batch) -> tuple[int, ...]:
        return (*batch.after, batch.micro_batch)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return build_optimizer(self.network, self._optimizer)

    def _losses(self, batch: Batch) -> tuple[Tensor, TargetSums]:
        logits_BLV = self._logits(self.network, batch, is_whole=data_of(self.trainer).is_whole)
        sums = target_sums(logits_BLV, batch.targets_BL)
        return sums.nats, sums

    def _logits(self, network: nn.Module, batch: Batch, *, is_whole: bool = False) -> Tensor:
        return network(
            batch.tokens_BL,
            batch.mask_BL,
            causal=self.causal,
            bounds=batch.bounds,
            is_whole=is_whole,
        ).logits_BLV

    def on_fit_start(self) -> None:
        """Counts residue frequencies, the baseline of the validation loss."""
        self._unigram_VV = (
            torch.from_numpy(data_of(self.trainer).unigram_table()).log().to(self.device)
        )

    def on_validation_epoch_start(self) -> None:
        self._validation = torch.zeros(6, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: Batch, batch_index: int) -> None:
        logits_BLV = self._logits(self.network, batch)
        targets_BL = residues_only(batch.targets_BL)
        chosen = targets_BL != IGNORE
        sums = target_sums(logits_BLV, targets_BL)
        ends = target_sums(logits_BLV, batch.targets_BL.masked_fill(chosen, IGNORE))
        unigram_nats = -self._unigram_VV[batch.tokens_BL[chosen], targets_BL[chosen]].sum()
        self._validation += torch.cat([sums.stacked(), unigram_nats[None], ends.stacked()[[0, 2]]])

    def validation_metrics(self) -> dict[str, float]:
        """Returns means over the residues that are targets, and over the ends of sequences.

        `valid_unigram_loss` is that of residue frequencies on the same targets and inputs. Without
        targets there are no means.
        """
        nats, correct, num_targets, unigram_nats, end_nats, num_ends = self.all_ranks(
            self._validation
        ).tolist()
        if not num_targets:
            return {}
        metrics = {
            "valid_loss": nats / num_targets,
            "valid_accuracy": correct / num_targets,
            "valid_perplexity": perplexity(nats, num_targets),
            "valid_unigram_loss": unigram_nats / num_targets,
        }
        return metrics | ({"valid_end_loss": end_nats / num_ends} if num_ends else {})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[DESCRIPTION] = self.description.to_plain()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.description = replace(self.description, source=checkpoint[DESCRIPTION].get("source"))
