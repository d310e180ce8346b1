"""Fine-tuning: the weights of a trained model, or LoRA adapters, with a linear head for labels.

Hu et al. 2021 (arXiv:2106.09685) for LoRA. The head begins as a linear probe, as Kumar et al. 2022
(arXiv:2202.10054) recommend: a random head distorts the features in the first steps.
"""

import logging
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from protlm.checkpoints.format import (
    all_checkpoints,
    checkpoint_name,
    load_training,
    newest_whole,
    remove,
)
from protlm.data.vocabulary import VOCABULARY
from protlm.errors import ExitCode, TrainingDivergedError
from protlm.model.transformer import ProteinLM
from protlm.paths import complete_file
from protlm.training.callbacks.preemption import StopOnSignal
from protlm.training.checkpoint_io import VerifiedCheckpointIO
from protlm.training.labeled_batches import Batches, LabeledTokens, TokenRows
from protlm.training.lightning_internals import quiet_and_interruptible

TRAIN_LOSS, VALID_LOSS = "train_loss", "valid_loss"
_KEPT = 2


@dataclass(frozen=True)
class FinetuneSettings:
    """The settings of the training.

    Attributes:
        epochs: passes over the training proteins, at most.
        patience: epochs without a lower validation loss after which training stops.
        learning_rate: of AdamW, constant after the warm-up of a tenth of an epoch.
        batch_size: proteins per step.
        seed: seed of order and dropout.
        device: `cpu` or `cuda`.
    """

    epochs: int = 20
    patience: int = 3
    learning_rate: float = 1e-4
    batch_size: int = 16
    seed: int = 0
    device: str = "cpu"


class Finetuning(pl.LightningModule):
    """A network and a linear head on the mean of its last hidden states.

    Args:
        network: the model; parameters that do not require gradients are not trained.
        head: outputs for each label.
        loss: of outputs and targets: `mean_squares`, `cross_entropy` or `binary_cross_entropy`.
        causal: how the model was trained.
        settings: the settings.
    """

    def __init__(
        self,
        network: ProteinLM,
        head: nn.Linear,
        *,
        loss: str,
        causal: bool,
        settings: FinetuneSettings,
    ) -> None:
        super().__init__()
        self.network, self.head = network, head
        self._loss, self._causal, self._settings = _LOSSES[loss], causal, settings
        self.best: dict[str, Tensor] = {}
        self.best_loss, self.stale_epochs = math.inf, 0
        self.losses: list[list[float]] = []
        self.warmup_steps = 1

    def forward(self, tokens_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Returns the outputs of the head, [B, outputs]."""
        last = self.network.num_layers
        out = self.network(tokens_BL, mask_BL, causal=self._causal, layers=[last])
        is_residue_BL = mask_BL & (tokens_BL != VOCABULARY.cls) & (tokens_BL != VOCABULARY.eos)
        sums_BD = (out.hidden[last] * is_residue_BL[..., None]).sum(dim=1)
        return self.head(sums_BD / is_residue_BL.sum(dim=1, keepdim=True).clamp(min=1))

    def training_step(self, batch: TokenRows, batch_index: int) -> Tensor:
        """Returns the mean loss of a batch; dropout is seeded by the batch's place."""
        place = np.random.SeedSequence([self._settings.seed, *batch.place])
        torch.manual_seed(int(place.generate_state(1)[0]))
        loss = self._loss(self(batch.tokens_BL, batch.mask_BL), batch.values)
        self.log(TRAIN_LOSS, loss, on_step=False, on_epoch=True, batch_size=len(batch.values))
        return loss

    def validation_step(self, batch: TokenRows, batch_index: int) -> None:
        """Logs the mean loss of the validation proteins."""
        loss = self._loss(self(batch.tokens_BL, batch.mask_BL), batch.values)
        self.log(VALID_LOSS, loss, on_epoch=True, batch_size=len(batch.values))

    def configure_optimizers(self) -> Any:
        """Returns AdamW over the parameters that are trained, with a linear warm-up."""
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self._settings.learning_rate)
        steps = self.warmup_steps
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / steps, 1))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": warmup, "interval": "step"},
        }

    def transfer_batch_to_device(
        self, batch: TokenRows, device: torch.device, dataloader_idx: int
    ) -> TokenRows:
        """Moves the tensors of a batch."""
        tokens_BL, mask_BL = batch.tokens_BL.to(device), batch.mask_BL.to(device)
        return TokenRows(tokens_BL, mask_BL, batch.values.to(device), batch.place)

    def trained_state(self) -> dict[str, Tensor]:
        """Returns copies of the parameters that are trained."""
        named = self.named_parameters()
        return {name: p.detach().cpu().clone() for name, p in named if p.requires_grad}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the best parameters so far."""
        checkpoint["best"], checkpoint["best_loss"] = self.best, self.best_loss
        checkpoint["stale_epochs"], checkpoint["losses"] = self.stale_epochs, self.losses

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores the best parameters so far."""
        self.best, self.best_loss = checkpoint["best"], checkpoint["best_loss"]
        self.stale_epochs, self.losses = checkpoint["stale_epochs"], checkpoint["losses"]


def _mean_squares(outputs: Tensor, values: Tensor) -> Tensor:
    return F.mse_loss(outputs[:, 0], values.to(outputs.dtype))


def _binary(outputs: Tensor, values: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, values.to(outputs.dtype))


_LOSSES = {
    "mean_squares": _mean_squares,
    "cross_entropy": F.cross_entropy,
    "binary_cross_entropy": _binary,
}


class KeepBest(Callback):
    """Sets the epoch of the batches, keeps the best parameters, and saves after each epoch.

    Args:
        folder: the folder of the run.
        batches: the training batches.
        patience: epochs without a lower validation loss after which training stops.
        stop: an epoch that it cut off is not saved, and is repeated by the resumed run.
    """

    def __init__(
        self, folder: Path, batches: Batches, *, patience: int, stop: StopOnSignal
    ) -> None:
        self._folder, self._batches = folder, batches
        self._patience, self._stop = patience, stop

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sets the epoch before the batches are read."""
        self._batches.epoch = trainer.current_epoch

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compares the validation loss with the best one, and saves a checkpoint."""
        if self._stop.received:
            return
        assert isinstance(pl_module, Finetuning)
        losses = [float(trainer.callback_metrics[name]) for name in (TRAIN_LOSS, VALID_LOSS)]
        pl_module.losses.append(losses)
        self._write(pl_module.losses)
        loss = losses[1]
        if not math.isfinite(loss):
            raise TrainingDivergedError(
                f"the validation loss of epoch {len(pl_module.losses)} is {loss}; remove "
                f"{self._folder} and type a smaller --learning-rate"
            )
        pl_module.stale_epochs += 1
        if loss < pl_module.best_loss:
            pl_module.best_loss, pl_module.best = loss, pl_module.trained_state()
            pl_module.stale_epochs = 0
        trainer.should_stop |= pl_module.stale_epochs >= self._patience
        folder = self._folder / "checkpoints"
        trainer.save_checkpoint(folder / checkpoint_name(trainer.global_step))
        for path in all_checkpoints(self._folder)[:-_KEPT]:
            remove(path)

    def _write(self, losses: list[list[float]]) -> None:
        rows = [f"{n},{one[0]:.6f},{one[1]:.6f}" for n, one in enumerate(losses, start=1)]
        with complete_file(self._folder / "metrics.csv", overwrite=True) as temporary:
            temporary.write_text("\n".join([f"epoch,{TRAIN_LOSS},{VALID_LOSS}", *rows, ""]))


def finetune(
    module: Finetuning,
    train: LabeledTokens,
    valid: LabeledTokens,
    *,
    folder: Path,
    settings: FinetuneSettings,
) -> ExitCode:
    """Trains until the patience or the epochs end, and sets the best parameters.

    A run that was interrupted continues after its last complete epoch.

    Args:
        module: the network and its head.
        train: the proteins that are trained on.
        valid: the proteins that decide when to stop.
        folder: the folder of checkpoints and `metrics.csv`.
        settings: the settings.

    Returns:
        Not 0 if a signal ended the training.

    Raises:
        InputDataError: all checkpoints are damaged.
        TrainingDivergedError: the validation loss is not finite.
    """
    checkpoint, faults = newest_whole(folder)
    for fault in faults:
        warnings.warn(f"{fault}; resuming from {checkpoint}", stacklevel=2)
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    if checkpoint is not None:
        contents = load_training(checkpoint)
        module.on_load_checkpoint(contents)
        if module.stale_epochs >= settings.patience:
            module.load_state_dict(module.best, strict=False)
            return ExitCode.OK
    stop, batches = StopOnSignal(), Batches(train, settings.batch_size, seed=settings.seed)
    is_gpu = settings.device.startswith("cuda")
    module.warmup_steps = max(len(batches) // 10, 1)
    trainer = pl.Trainer(
        default_root_dir=folder,
        accelerator="gpu" if is_gpu else "cpu",
        devices=[torch.device(settings.device).index or 0] if is_gpu else 1,
        max_epochs=settings.epochs,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        plugins=[VerifiedCheckpointIO()],
        callbacks=[KeepBest(folder, batches, patience=settings.patience, stop=stop), stop],
    )
    with quiet_and_interruptible():
        trainer.fit(
            module.train(),
            DataLoader(batches, batch_size=None),
            DataLoader(Batches(valid, settings.batch_size, seed=None), batch_size=None),
            ckpt_path=checkpoint,
            weights_only=True,
        )
    if stop.received:
        return stop.exit_code
    module.load_state_dict(module.best, strict=False)
    return ExitCode.OK
