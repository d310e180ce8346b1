"""Logs loss, throughput, memory and the values of probes, and drives the progress bar."""

import math
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.profilers import Profiler
from torch import Tensor

from protlm.data.dataset import FILLER, Batch
from protlm.data.vocabulary import VOCABULARY
from protlm.model.objective import perplexity
from protlm.model.pretrained import PretrainedModel
from protlm.model.transformer import ProteinLM
from protlm.system.terminal import JobProgress
from protlm.training.callbacks.hooks import LoopCallback, log
from protlm.training.flops import ModelFlops, peak_tflops
from protlm.training.module import LanguageModeling, Training

_FETCH = ".train_dataloader_next"


class DataWait(Profiler):
    """Measures the seconds in which the training loop waits for its next batch.

    Lightning reports the start and end of each fetch of a batch, and of many other actions, to its
    profiler.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = self._since = 0.0

    def start(self, action_name: str) -> None:
        if action_name.endswith(_FETCH):
            self._since = time.perf_counter()

    def stop(self, action_name: str) -> None:
        if action_name.endswith(_FETCH):
            self.seconds += time.perf_counter() - self._since


# Sums over the batches and ranks between two logs: of nats, right predictions and targets, of
# samples, residues, useful and all positions, of FLOPs, and of seconds that were waited.
_NUM_SUMS = 9


class Monitor(LoopCallback):
    """Logs loss, accuracy, learning rate, gradient norm, throughput, utilization and memory.

    Sums are accumulated since the last log, added up over ranks, and divided once. `peak` has the
    TFLOP/s of a device that is not in the table of `flops`.
    """

    def __init__(
        self, *, every: int, max_steps: int, data_wait: DataWait, peak: float | None = None
    ) -> None:
        self.every, self.max_steps = every, max_steps
        self._data_wait, self._peak = data_wait, peak
        self._flops: ModelFlops | None = None
        self._row_flops = 0
        self._note = ""
        self._trainer: Trainer | None = None
        self._restored: dict[str, Any] = {}
        self._rate = math.nan
        self._progress = JobProgress("training", max_steps, quiet=True)

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums since the last log, so that a resumed run logs the same values."""
        if self._trainer is None:
            return {}
        sums = self._trainer.strategy.reduce(self._total(), reduce_op="sum")
        assert isinstance(sums, Tensor)
        return {"sums": sums.tolist(), "seconds": time.perf_counter() - self._since}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, LanguageModeling)
        self._trainer = trainer
        self._peak = self._peak or peak_tflops(pl_module.device)
        if self._peak is not None:
            self._flops = ModelFlops(pl_module.network, causal=pl_module.causal)
        self._restart(pl_module.device)
        if self._restored and trainer.is_global_zero:
            self._sums += self._sums.new_tensor(self._restored["sums"])
            self._since -= self._restored["seconds"]
        self._progress = JobProgress(
            "training",
            self.max_steps,
            done=trainer.global_step,
            quiet=not trainer.is_global_zero,
        )
        self._progress.__enter__()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        if self._flops is not None:
            self._row_flops = self._flops.training(
                batch.tokens_BL.shape[1], pl_module.device, batch.bounds
            )

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Records the rate of this step; at the end of the batch it is that of the next step."""
        self._rate = float(optimizer.param_groups[0]["lr"])

    def on_batch_end(self, trainer: Trainer, outputs: Any, batch: Batch) -> None:
        self._sums += torch.cat([outputs["sums"], self._sizes(batch)])

    def on_step_end(self, trainer: Trainer, module: Training, batch: Batch) -> None:
        if trainer.global_step % self.every == 0:
            assert isinstance(module, LanguageModeling)
            self._log(trainer, module, batch)
        self._progress.update(trainer.global_step, self._note)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation_start = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, LanguageModeling)
        metrics = pl_module.validation_metrics()
        # A validation that a signal interrupted is repeated by the resumed run.
        if metrics and not trainer.should_stop:
            log(trainer, metrics)
            self._progress.print(f"step {trainer.global_step:,}: {_validation_in_short(metrics)}")
        self.exclude(time.perf_counter() - self._validation_start)

    def exclude(self, seconds: float) -> None:
        self._since += seconds

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._progress.__exit__(None, None, None)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._progress.__exit__(type(exception), exception, None)

    def _restart(self, device: torch.device) -> None:
        self._sums = torch.zeros(_NUM_SUMS, dtype=torch.float64, device=device)
        self._data_wait.seconds = 0.0
        self._since = time.perf_counter()

    def _total(self) -> Tensor:
        total = self._sums.clone()
        total[-1] += self._data_wait.seconds
        return total

    def _log(self, trainer: Trainer, module: LanguageModeling, batch: Batch) -> None:
        nats, correct, targets, samples, residues, useful, padded, flops, waited = module.all_ranks(
            self._total()
        ).tolist()
        seconds = time.perf_counter() - self._since
        device_seconds = seconds * trainer.world_size
        metrics = {
            "epoch": batch.after[0],
            "samples": batch.after[1],
            "seconds": seconds,
            "train_loss": nats / targets if targets else math.nan,
            "train_accuracy": correct / targets if targets else math.nan,
            "learning_rate": self._rate,
            "gradient_norm": float(module.gradient_norm),
            "samples_per_second": samples / seconds,
            "residues_per_second": residues / seconds,
            "residues_per_second_per_device": residues / device_seconds,
            "padding_fraction": 1 - useful / max(padded, 1),
            "data_wait_fraction": waited / device_seconds,
            "memory_gib": _peak_memory(module.device) / 2**30,
        }
        if self._peak is not None:
            metrics["model_flops_utilization"] = flops / device_seconds / self._peak / 1e12
        log(trainer, metrics)
        self._note = _in_short(metrics)
        self._restart(module.device)

    def _sizes(self, batch: Batch) -> Tensor:
        """Returns samples, residues, useful and all positions, FLOPs and 0 seconds, float64."""
        tokens_BL, mask_BL = batch.tokens_BL, batch.mask_BL
        is_special_BL = (tokens_BL == VOCABULARY.cls) | (tokens_BL == VOCABULARY.eos)
        is_filler_B = batch.samples_B == FILLER
        useful_BL = mask_BL & ~is_filler_B[:, None]
        num_samples = (~is_filler_B).sum()
        sizes = [
            num_samples.new_full((), len(batch.joined_N)) if batch.bounds else num_samples,
            (useful_BL & ~is_special_BL).sum(),
            useful_BL.sum(),
            num_samples.new_full((), mask_BL.numel()),
            num_samples.double() * self._row_flops,
            torch.zeros_like(num_samples),
        ]
        return torch.stack([size.double() for size in sizes])


def _in_short(metrics: dict[str, float]) -> str:
    parts = [
        f"loss {metrics['train_loss']:{'.3f' if metrics['train_loss'] >= 0.1 else '.3g'}}",
        f"lr {metrics['learning_rate']:.2g}",
        f"gradient {metrics['gradient_norm']:.2g}",
        f"{metrics['residues_per_second']:,.0f} residues/s",
        f"{metrics['residues_per_second_per_device']:,.0f} a device",
        f"waiting {metrics['data_wait_fraction']:.0%}",
        f"{metrics['memory_gib']:.1f} GiB",
    ]
    if (utilization := metrics.get("model_flops_utilization")) is not None:
        parts.insert(5, f"MFU {utilization:.1%}")
    return "  ".join(parts)


def _validation_in_short(metrics: dict[str, float]) -> str:
    """Formats the line that is printed after a validation.

    >>> metrics = {"valid_loss": 2.61, "valid_accuracy": 0.2, "valid_unigram_loss": 2.885}
    >>> _validation_in_short(metrics)
    'validation loss 2.610, perplexity 13.6, accuracy 20.0 % (unigram: loss 2.885, perplexity 17.9)'
    """
    loss, unigram = metrics["valid_loss"], metrics["valid_unigram_loss"]
    return (
        f"validation loss {loss:.3f}, perplexity {perplexity(loss, 1):.1f}, "
        f"accuracy {100 * metrics['valid_accuracy']:.1f} % "
        f"(unigram: loss {unigram:.3f}, perplexity {perplexity(unigram, 1):.1f})"
    )


def _peak_memory(device: torch.device) -> int:
    """Returns the peak of allocated GPU memory, or of resident memory, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts in KiB.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class MeasureModel(LoopCallback):
    """Logs what a function measures, its columns, at intervals of steps, on the first rank.

    Training is as without it: random numbers and the modes of all modules are restored, and its
    time does not count in the throughput. The weights are those of the step, not their average.
    """

    def __init__(
        self,
        measure: Callable[[PretrainedModel], Mapping[str, float]],
        columns: Sequence[str],
        *,
        every: int,
    ) -> None:
        self._measure, self.columns, self._every = measure, columns, every

    def on_step_end(self, trainer: Trainer, module: Training, batch: Any) -> None:
        if trainer.global_step % self._every or not trainer.is_global_zero:
            return
        assert isinstance(module, LanguageModeling)
        start = time.perf_counter()
        log(trainer, self._measured(module))
        for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(callback, Monitor):
                callback.exclude(time.perf_counter() - start)

    def _measured(self, module: LanguageModeling) -> Mapping[str, float]:
        modes = [(part, part.training) for part in module.modules()]
        devices = [] if module.device.type == "cpu" else [module.device]
        try:
            with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
                return self._measure(
                    PretrainedModel(module.network, module.description, rebuild=_no_baseline)
                )
        finally:
            for part, mode in modes:
                part.training = mode


def _no_baseline(seed: int) -> ProteinLM:
    raise AssertionError("measurements in training have no random baseline")
