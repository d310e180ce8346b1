"""Small hooks into the loop, one class for each."""

import faulthandler
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from protlm.attention.base import RandomFeatures
from protlm.checkpoints.format import AVERAGE
from protlm.data.batching.plan import Progress
from protlm.model.transformer import ProteinLM
from protlm.system.errors import UserError
from protlm.training.lightning_internals import (
    rescale_batch_counters,
    set_last_step,
    validate_after_this_batch,
    validate_now,
)
from protlm.training.module import Training, data_of

T = TypeVar("T")
# The key of a checkpoint under which the micro-batches per optimizer step are saved.
_PARTS = "batches_per_step"
# The fraction of the time-out after which the stacks are written, well before a rank gives up.
_STACKS_AT = 0.5
_APART_SECONDS = 0.25
# Beyond this number torch runs eagerly.
_MOST_GRAPHS = 1024


class LoopCallback(Callback):
    """A callback with hooks after optimizer steps; it logs `columns` beside those of every run."""

    columns: Sequence[str] = ()

    def on_batch_end(self, trainer: Trainer, outputs: Any, batch: Any) -> None:
        """Acts after each micro-batch, before `on_step_end`."""

    def on_step_end(self, trainer: Trainer, module: Training, batch: Any) -> None:
        """Acts after the last micro-batch of a step."""

    def on_validated_batch(self, trainer: Trainer, number: int) -> None:
        """Acts after a batch of a validation; the first one has the number 1."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.on_batch_end(trainer, outputs, batch)
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            assert isinstance(pl_module, Training)
            self.on_step_end(trainer, pl_module, batch)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.on_validated_batch(trainer, batch_idx + 1)


def log(trainer: Trainer, metrics: Mapping[str, float]) -> None:
    """Logs metrics of the present step."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), trainer.global_step)


def of_all_ranks(value: T) -> list[T]:
    """Returns the value of each rank; all ranks must call this."""
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class CheckSameStep(Callback):
    """Rejects ranks that resume from different steps; each chooses its checkpoint itself."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        steps = of_all_ranks(trainer.global_step)
        other = next((rank for rank, step in enumerate(steps) if step != steps[0]), None)
        if other is not None:
            raise UserError(
                f"rank 0 resumes from step {steps[0]}, rank {other} from step {steps[other]}: "
                f"run_dir={trainer.default_root_dir} is not the same directory for both; type a "
                "run_dir= on a file system that all nodes see"
            )


class TrackDataProgress(LoopCallback):
    """Updates the position of the data module, so that checkpoints save it.

    A checkpoint also saves the number of micro-batches per step: a resumed run may have more or
    fewer, and Lightning's counters of batches are rescaled.
    """

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[_PARTS] = trainer.accumulate_grad_batches

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        rescale_batch_counters(
            checkpoint, before=checkpoint[_PARTS], now=trainer.accumulate_grad_batches
        )

    def on_step_end(self, trainer: Trainer, module: Training, batch: Any) -> None:
        """Reads the position from the batch itself, because loaders run ahead of training."""
        data_of(trainer).progress = Progress(*batch.after)


class RedrawFeatures(Callback):
    """Redraws random projections as a pure function of the optimizer step, outside `forward`.

    The last bits of LAPACK's results differ between processors, so all ranks use the draws and
    tables of rank 0.

    Args:
        keeps: keeps those of the first weights.
    """

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for buffer in pl_module.buffers():
            buffer.copy_(trainer.strategy.broadcast(buffer))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._keeps:
            return
        for module in pl_module.modules():
            if not isinstance(module, RandomFeatures) or module.redraw_every is None:
                continue
            index, rest = divmod(trainer.global_step, module.redraw_every)
            if rest == 0:
                module.redraw(index)
                for buffer in module.buffers(recurse=False):
                    buffer.copy_(trainer.strategy.broadcast(buffer))


class ValidateLastStep(LoopCallback):
    """Validates the last weights of a run whose length is not a multiple of the interval."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps

    def on_step_end(self, trainer: Trainer, module: Training, batch: Any) -> None:
        if trainer.global_step >= self._max_steps:
            validate_after_this_batch(trainer)


class ResumeValidation(Callback):
    """Validates the step that a run starts from, where this is due or was interrupted."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Allows Lightning to start a run that has made its last step."""
        set_last_step(trainer, self._max_steps + 1)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        validate_now(trainer)
        set_last_step(trainer, self._max_steps)


class StallWatchdog(LoopCallback):
    """Writes the stacks of all threads if a rank completes no step for half of the time-out.

    All ranks do so: the log shows which rank is stuck and where, and where the others wait for it.
    Crashes in native code, such as an abort of NCCL, are reported in the same way.
    """

    def __init__(self, *, timeout_minutes: float) -> None:
        self._seconds = timeout_minutes * 60 * _STACKS_AT

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size > 1:
            faulthandler.enable()
            self._restart(trainer)

    def on_batch_end(self, trainer: Trainer, outputs: Any, batch: Any) -> None:
        self._restart(trainer)

    def on_validated_batch(self, trainer: Trainer, number: int) -> None:
        self._restart(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._stop(trainer)

    def _restart(self, trainer: Trainer) -> None:
        if trainer.world_size > 1:
            # The ranks of a machine write one after another, so that stacks are not interleaved.
            wait = self._seconds + min(_APART_SECONDS * trainer.local_rank, self._seconds / 2)
            faulthandler.dump_traceback_later(wait)

    def _stop(self, trainer: Trainer) -> None:
        if trainer.world_size > 1:
            faulthandler.cancel_dump_traceback_later()


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
        self._average = checkpoint[AVERAGE]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Training)
        self._average = {
            name: self._average.get(name, weight).detach().to(weight.device, copy=True)
            for name, weight in _weights(pl_module).items()
        }
        trainer.optimizers[0].register_step_post_hook(lambda *_: self._update(pl_module))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._exchange(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._exchange(pl_module)

    @torch.no_grad()
    def _update(self, module: Training) -> None:
        if module.is_skipped:
            return
        weights = _weights(module)
        self._num_updates += 1
        decay = min(self._decay, (1 + self._num_updates) / (10 + self._num_updates))
        average = [self._average[name] for name in weights]
        get_ema_multi_avg_fn(decay)(average, list(weights.values()), self._num_updates)

    @torch.no_grad()
    def _exchange(self, module: LightningModule) -> None:
        for name, weight in _weights(module).items():
            kept = weight.clone()
            weight.copy_(self._average[name])
            self._average[name].copy_(kept)


def _weights(module: LightningModule) -> dict[str, Tensor]:
    return dict(module.get_submodule("network").named_parameters())


def compile_model(network: ProteinLM, *, backend: Any = "inductor") -> None:
    """Compiles the forward pass of the model in place; names in the state dict do not change.

    Shapes are not symbolic: batches have few shapes, and linear attention needs a known length to
    cut it into tiles. Hooks of the model itself stay outside the graph.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _MOST_GRAPHS)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, _MOST_GRAPHS)
    # BigBird recomputes tiles in its backward pass, where a graph ends without this setting.
    if hasattr(config, "trace_autograd_ops"):
        config.trace_autograd_ops = True
    network.forward = torch.compile(network.forward, dynamic=False, backend=backend)


class RunEagerly(LoopCallback):
    """Runs a compiled model eagerly where a graph does not pay off.

    This applies to validation, which would need a second graph for each shape, and to the batches
    that callbacks inspect by hooks: of one step in `every`.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._every is not None and (trainer.global_step + 1) % self._every == 0:
            torch.compiler.set_stance("force_eager")

    def on_step_end(self, trainer: Trainer, module: Training, batch: Any) -> None:
        torch.compiler.set_stance("default")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.compiler.set_stance("force_eager")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.compiler.set_stance("default")
