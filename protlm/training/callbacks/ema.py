"""An exponential moving average of the weights."""

from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from protlm.checkpoints.format import AVERAGE
from protlm.training.module import Objective


class AverageWeights(Callback):
    """Averages the weights over the optimizer steps, and validates with the average.

    After the n-th step, a ← a + (1 - d)(w - a) with d = min(decay, (1 + n)/(10 + n)), as in
    TensorFlow's ExponentialMovingAverage with `num_updates`. The random initial weights are thus
    forgotten quickly even if the decay is slow. The average is kept in float32, is saved in every
    checkpoint, and is used when the model is loaded.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._num_updates = 0
        self._average: dict[str, Tensor] = {}
        self._restored: dict[str, Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self._num_updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._num_updates = state_dict["num_updates"]

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[AVERAGE] = self._average

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._restored = checkpoint[AVERAGE]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts from the weights, or from the restored average."""
        assert isinstance(pl_module, Objective)
        weights = _weights(pl_module)
        self._average = {name: weight.detach().clone() for name, weight in weights.items()}
        with torch.no_grad():
            for name, restored in self._restored.items():
                self._average[name].copy_(restored)
        self._restored = {}
        trainer.optimizers[0].register_step_post_hook(lambda *_: self._update(pl_module))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Objective)
        self._exchange(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Objective)
        self._exchange(pl_module)

    @torch.no_grad()
    def _update(self, module: Objective) -> None:
        if module.is_skipped:
            return
        weights = _weights(module)
        self._num_updates += 1
        decay = min(self._decay, (1 + self._num_updates) / (10 + self._num_updates))
        average = [self._average[name] for name in weights]
        get_ema_multi_avg_fn(decay)(average, list(weights.values()), self._num_updates)

    @torch.no_grad()
    def _exchange(self, module: Objective) -> None:
        for name, weight in _weights(module).items():
            kept = weight.clone()
            weight.copy_(self._average[name])
            self._average[name].copy_(kept)


def _weights(module: Objective) -> dict[str, Tensor]:
    return dict(module.network.named_parameters())
