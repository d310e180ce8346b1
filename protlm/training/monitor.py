"""Measures a run and tells it, to the loggers and to whoever watches."""

import time
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor

from protlm.data.dataset import Batch
from protlm.data.vocabulary import VOCABULARY
from protlm.model.objective import perplexity
from protlm.progress import JobProgress
from protlm.training.module import LanguageModeling


class Monitor(Callback):
    """Logs loss, accuracy, learning rate, gradient norm, throughput and the share of padding.

    Sums are kept over the steps since the last log, added up over ranks, and divided once.
    """

    def __init__(self, *, every: int, max_steps: int) -> None:
        self.every, self.max_steps = every, max_steps
        self._note = ""
        self._trainer: pl.Trainer | None = None
        self._restored: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """The sums since the last log, so that a continued run logs the same."""
        if self._trainer is None:
            return {}
        sums = self._trainer.strategy.reduce(self._sums.clone(), reduce_op="sum")
        assert isinstance(sums, Tensor)
        return {"sums": sums.tolist(), "seconds": time.perf_counter() - self._since}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up the sums."""
        self._restored = state_dict

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts the clock and the progress report."""
        self._trainer = trainer
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

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Adds the batch to the sums, and logs them when it is time."""
        self._sums += torch.cat([outputs["sums"], _sizes(batch)])
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        if trainer.global_step % self.every == 0:
            assert isinstance(pl_module, LanguageModeling)
            self._log(trainer, pl_module, batch)
        self._progress.update(trainer.global_step, self._note)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops the clock."""
        self._validation_start = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Logs the validation, and leaves its time out of the throughput."""
        assert isinstance(pl_module, LanguageModeling)
        nats, correct, count = pl_module.validation_sums()
        if count and not trainer.sanity_checking:
            self._write(
                trainer,
                {
                    "valid_loss": nats / count,
                    "valid_accuracy": correct / count,
                    "valid_perplexity": perplexity(nats, count),
                },
            )
        self._since += time.perf_counter() - self._validation_start

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends the progress report."""
        self._progress.__exit__(None, None, None)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Takes the progress bar away so that the message can be read."""
        if hasattr(self, "_progress"):
            self._progress.__exit__(type(exception), exception, None)

    def _restart(self, device: torch.device) -> None:
        self._sums = torch.zeros(7, dtype=torch.float64, device=device)
        self._since = time.perf_counter()

    def _log(self, trainer: pl.Trainer, module: LanguageModeling, batch: Batch) -> None:
        nats, correct, targets, samples, residues, useful, padded = module.all_ranks(
            self._sums
        ).tolist()
        seconds = time.perf_counter() - self._since
        loss = nats / max(targets, 1)
        self._write(
            trainer,
            {
                "epoch": batch.after[0],
                "samples": batch.after[1],
                "train_loss": loss,
                "train_accuracy": correct / max(targets, 1),
                "learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
                "gradient_norm": float(module.gradient_norm),
                "samples_per_second": samples / seconds,
                "residues_per_second": residues / seconds,
                "padding_share": 1 - useful / max(padded, 1),
            },
        )
        self._note = f"loss {loss:.3f}  {residues / seconds:,.0f} residues/s"
        self._restart(module.device)

    def _write(self, trainer: pl.Trainer, metrics: dict[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(metrics, trainer.global_step)


def _sizes(batch: Batch) -> Tensor:
    """Samples, residues, useful positions and all positions of a batch, float64."""
    tokens_BL, mask_BL = batch.tokens_BL, batch.mask_BL
    is_special_BL = (tokens_BL == VOCABULARY.cls) | (tokens_BL == VOCABULARY.eos)
    is_filler_B = batch.samples_B < 0
    useful_BL = mask_BL & ~is_filler_B[:, None]
    sizes = [
        (~is_filler_B).sum(),
        (useful_BL & ~is_special_BL).sum(),
        useful_BL.sum(),
        torch.tensor(mask_BL.numel(), device=mask_BL.device),
    ]
    return torch.stack(sizes).double()
