"""Measures during training what the model has learned beside its loss."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from pytorch_lightning import Trainer

from protlm.model.pretrained import PretrainedModel
from protlm.model.transformer import ProteinLM
from protlm.training.callbacks.hooks import LoopCallback
from protlm.training.callbacks.monitor import Monitor
from protlm.training.module import LanguageModeling, Objective


class Measurement(NamedTuple):
    """A function that measures a model, and the names of its values."""

    measure: Callable[[PretrainedModel], Mapping[str, float]]
    columns: Sequence[str]


class MeasureModel(LoopCallback):
    """Logs the values of a measurement at intervals of steps, on the first rank.

    Training is as without it: random numbers and the modes of all modules are restored, and its
    time does not count in the throughput. The weights are those of the step, not their average.
    """

    def __init__(self, measurement: Measurement, *, every: int) -> None:
        self._measurement, self._every = measurement, every
        self.columns = measurement.columns

    def on_step_end(self, trainer: Trainer, module: Objective, batch: Any) -> None:
        if trainer.global_step % self._every or not trainer.is_global_zero:
            return
        assert isinstance(module, LanguageModeling)
        start = time.perf_counter()
        values = self._measured(module)
        for logger in trainer.loggers:
            logger.log_metrics(dict(values), trainer.global_step)
        for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(callback, Monitor):
                callback.exclude(time.perf_counter() - start)

    def _measured(self, module: LanguageModeling) -> Mapping[str, float]:
        modes = [(part, part.training) for part in module.modules()]
        devices = [] if module.device.type == "cpu" else [module.device]
        try:
            with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
                model = PretrainedModel(module.network, module.description, rebuild=_no_baseline)
                return self._measurement.measure(model)
        finally:
            for part, mode in modes:
                part.training = mode


def _no_baseline(seed: int) -> ProteinLM:
    raise AssertionError("measurements in training have no random baseline")
