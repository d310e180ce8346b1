"""An exponential moving average of the weights, beside those that are trained."""

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from protlm.model.checkpoint import AVERAGE
from protlm.training.module import LanguageModeling


class AverageWeights(Callback):
    """Averages the weights over the optimiser steps, and validates with the average.

    After the n-th step that was made, a ← a + (1 - d)(w - a) with d = min(decay, (1 + n)/(10 + n)):
    the weights of the start, which are random, are soon forgotten however slow the decay is (as
    TensorFlow's ExponentialMovingAverage does with `num_updates`). It is kept in float32, as
    weights are, stands in every checkpoint, and is what a trained model is used with.

    Args:
        decay: of a step, below 1.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._num_updates = 0
        self._average: dict[str, Tensor] = {}
        self._restored: dict[str, Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        """How many steps there are in the average."""
        return {"num_updates": self._num_updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up the count."""
        self._num_updates = state_dict["num_updates"]

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Writes the average beside the weights."""
        checkpoint[AVERAGE] = self._average

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Takes up the average."""
        self._restored = checkpoint[AVERAGE]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts from the weights, or goes on."""
        assert isinstance(pl_module, LanguageModeling)
        weights = _weights(pl_module)
        self._average = {name: weight.detach().clone() for name, weight in weights.items()}
        with torch.no_grad():
            for name, restored in self._restored.items():
                _local(self._average[name]).copy_(_local(restored))
        self._restored = {}
        trainer.optimizers[0].register_step_post_hook(lambda *_: self._update(pl_module))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Puts the average in the place of the weights."""
        assert isinstance(pl_module, LanguageModeling)
        self._exchange(pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Puts the weights back."""
        assert isinstance(pl_module, LanguageModeling)
        self._exchange(pl_module)

    @torch.no_grad()
    def _update(self, module: LanguageModeling) -> None:
        if module.is_left_out:
            return
        weights = _weights(module)
        self._num_updates += 1
        decay = min(self._decay, (1 + self._num_updates) / (10 + self._num_updates))
        average = [_local(self._average[name]) for name in weights]
        update = get_ema_multi_avg_fn(decay)
        update(average, [_local(weight) for weight in weights.values()], self._num_updates)

    @torch.no_grad()
    def _exchange(self, module: LanguageModeling) -> None:
        # In place: sharded weights are views of memory that others hold.
        for name, weight in _weights(module).items():
            mine, average = _local(weight), _local(self._average[name])
            kept = mine.clone()
            mine.copy_(average)
            average.copy_(kept)


def _weights(module: LanguageModeling) -> dict[str, Tensor]:
    return dict(module.network.named_parameters())


def _local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
