"""Fine-tuning: the weights of a trained model, or LoRA adapters, with a linear head for labels.

Hu et al. 2021 (arXiv:2106.09685) for LoRA. The head begins as a linear probe, as Kumar et al. 2022
(arXiv:2202.10054) recommend: a random head distorts the features in the first steps.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from protlm.data.vocabulary import VOCABULARY
from protlm.model.embedding import batches
from protlm.model.transformer import ProteinLM
from protlm.training.labeled_batches import LabeledTokens, TokenRows


@dataclass(frozen=True)
class FinetuneSettings:
    """The settings of the training.

    Attributes:
        epochs: passes over the training proteins, at most.
        patience: epochs without a lower validation loss after which training stops.
        learning_rate: of AdamW, constant after the warm-up of a tenth of an epoch.
        batch_size: proteins per step, of all devices.
        tokens_per_batch: rows times length of a pass, at most; a larger batch takes several.
        seed: seed of order and dropout.
        device: `cpu` or `cuda`.
        devices: the number of devices, which divide each batch.
    """

    epochs: int = 20
    patience: int = 3
    learning_rate: float = 1e-4
    batch_size: int = 16
    tokens_per_batch: int = 16_384
    seed: int = 0
    device: str = "cpu"
    devices: int = 1


@dataclass(frozen=True)
class Metric:
    """A metric of outputs, values and the protein of each, all NumPy arrays [labels, ...]."""

    name: str
    of: Callable[[np.ndarray, np.ndarray, np.ndarray], float]


class Finetuning(pl.LightningModule):
    """A network and a linear head on its last hidden states: their mean, or those of residues.

    Args:
        network: the model; parameters that do not require gradients are not trained.
        head: outputs for each label.
        loss: of outputs and targets: `mean_squares`, `cross_entropy` or `binary_cross_entropy`.
        metric: what is measured beside the validation loss.
        valid: the proteins that are validated on.
        causal: how the model was trained.
        settings: the settings.
    """

    def __init__(
        self,
        network: ProteinLM,
        head: nn.Linear,
        *,
        loss: str,
        metric: Metric,
        valid: LabeledTokens,
        causal: bool,
        settings: FinetuneSettings,
    ) -> None:
        super().__init__()
        self.network, self.head, self.metric = network, head, metric
        self._loss, self._causal, self._settings = _LOSSES[loss], causal, settings
        self._valid = valid
        self.best: dict[str, Tensor] = {}
        self.best_loss, self.stale_epochs = math.inf, 0
        # The training loss, the validation loss and the metric: of the start, where the first is
        # NaN, and of each epoch.
        self.losses: list[list[float]] = []
        self.warmup_steps = 1
        self._train_sums = torch.zeros(2, dtype=torch.float64)
        self._valid_outputs = torch.zeros(0)

    @property
    def start_is_best(self) -> bool:
        """Whether no epoch has a lower validation loss than the start."""
        return min(self.losses, key=lambda one: one[1]) is self.losses[0]

    def forward(self, batch: TokenRows) -> Tensor:
        """Returns the outputs of the head, [labels, outputs].

        The activations of a batch of several passes are computed again for the gradient, one pass
        at a time.
        """
        tokens_BL, mask_BL, is_label_BL = batch.tokens_BL, batch.mask_BL, batch.is_label_BL
        if tokens_BL.numel() <= self._settings.tokens_per_batch:
            return self._outputs(tokens_BL, mask_BL, is_label_BL)
        lengths = mask_BL.sum(1).tolist()
        outputs, passes = [], list(batches(lengths, self._settings.tokens_per_batch))
        for rows in passes:
            given = (tokens_BL, mask_BL, is_label_BL)
            cut = [None if x is None else x[rows, : lengths[rows[-1]]] for x in given]
            outputs.append(checkpoint(self._outputs, *cut, use_reentrant=False))
        counts = [1] * len(lengths) if is_label_BL is None else is_label_BL.sum(1).tolist()
        labels = torch.arange(sum(counts)).split(counts)
        order = torch.cat([labels[row] for rows in passes for row in rows])
        return torch.cat(outputs)[order.argsort()]

    def _outputs(self, tokens_BL: Tensor, mask_BL: Tensor, is_label_BL: Tensor | None) -> Tensor:
        last = self.network.num_layers
        out = self.network(tokens_BL, mask_BL, causal=self._causal, layers=[last])
        hidden_BLD = out.hidden[last]
        if is_label_BL is not None:
            return self.head(hidden_BLD[is_label_BL])
        is_residue_BL = mask_BL & (tokens_BL != VOCABULARY.cls) & (tokens_BL != VOCABULARY.eos)
        sums_BD = (hidden_BLD * is_residue_BL[..., None]).sum(dim=1)
        return self.head(sums_BD / is_residue_BL.sum(dim=1, keepdim=True).clamp(min=1))

    def on_train_epoch_start(self) -> None:
        """Restarts the sums of the training loss."""
        self._train_sums = torch.zeros(2, dtype=torch.float64, device=self.device)

    def training_step(self, batch: TokenRows, batch_index: int) -> Tensor:
        """Returns the loss whose mean over the processes is the mean over the batch's labels.

        Dropout is seeded by the batch's place.
        """
        place = np.random.SeedSequence([self._settings.seed, *batch.place])
        torch.manual_seed(int(place.generate_state(1)[0]))
        loss = self._loss(self(batch), batch.values)
        if batch.weight:
            self._train_sums += torch.stack([loss.detach(), loss.new_tensor(len(batch.values))])
        return loss * (batch.weight * self.trainer.world_size)

    def train_loss(self) -> float:
        """Returns the mean loss of the labels of this epoch, of all processes."""
        total, count = self._all_processes(self._train_sums).tolist()
        return total / count

    def on_validation_epoch_start(self) -> None:
        """Makes room for the outputs of all validation labels."""
        shape = (len(self._valid.values), self.head.out_features)
        self._valid_outputs = torch.zeros(shape, device=self.device)

    def validation_step(self, batch: TokenRows, batch_index: int) -> None:
        """Keeps the outputs of a batch."""
        if batch.weight:
            self._valid_outputs[torch.from_numpy(batch.rows).to(self.device)] = self(batch)

    def valid_scores(self) -> tuple[float, float]:
        """Returns the mean loss of the validation labels and the metric, of all processes."""
        outputs = self._all_processes(self._valid_outputs).cpu()
        values = self._valid.values
        loss = self._loss(outputs.double(), torch.from_numpy(values)) / len(values)
        return float(loss), self.metric.of(outputs.numpy(), values, self._valid.groups)

    def _all_processes(self, mine: Tensor) -> Tensor:
        sums = self.trainer.strategy.reduce(mine.clone(), reduce_op="sum")
        assert isinstance(sums, Tensor)
        return sums

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
        given = {"tokens_BL": batch.tokens_BL, "mask_BL": batch.mask_BL, "values": batch.values}
        if batch.is_label_BL is not None:
            given["is_label_BL"] = batch.is_label_BL
        return replace(batch, **{name: tensor.to(device) for name, tensor in given.items()})

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


# Sums over the labels.
def _mean_squares(outputs: Tensor, values: Tensor) -> Tensor:
    return F.mse_loss(outputs[:, 0], values.to(outputs.dtype), reduction="sum")


def _cross_entropy(outputs: Tensor, values: Tensor) -> Tensor:
    return F.cross_entropy(outputs, values, reduction="sum")


def _binary(outputs: Tensor, values: Tensor) -> Tensor:
    sums = F.binary_cross_entropy_with_logits(outputs, values.to(outputs.dtype), reduction="sum")
    return sums / outputs.shape[1]


_LOSSES = {
    "mean_squares": _mean_squares,
    "cross_entropy": _cross_entropy,
    "binary_cross_entropy": _binary,
}
