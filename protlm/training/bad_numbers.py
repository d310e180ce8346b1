"""Steps that are left out: loss or gradient not finite, or a gradient far larger than usual.

The module leaves a step out (`LanguageModeling.on_before_optimizer_step`), on all ranks alike: the
weights, the optimiser and the schedule stay as they are. It is a step of the run all the same: its
data are consumed, and it has its number in the log and among the checkpoints.
"""

import json
import math
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor

from protlm.data.dataset import FILLER, Batch
from protlm.errors import OutputError, TrainingDivergedError
from protlm.model.checkpoint import latest
from protlm.paths import complete_file
from protlm.training.module import LanguageModeling

BAD_BATCHES = "bad_batches.jsonl"
# Steps whose gradient norms a spike is compared with.
WINDOW = 100


class WatchBadSteps(Callback):
    """Writes down which samples a bad step had, and ends the run when there are too many in a row.

    With a spike guard it also tells the module from which gradient norm on a step is left out: so
    many times the median of the last 100 steps that were made, once there are so many.

    Args:
        run_dir: the directory of the run, where `bad_batches.jsonl` gets a line for each bad step.
        identify: gives the accession of a sample by its number.
        max_in_a_row: ends the run.
        spike_guard: the factor, or None for no guard.
    """

    def __init__(
        self,
        run_dir: Path,
        identify: Callable[[int], str],
        *,
        max_in_a_row: int,
        spike_guard: float | None,
    ) -> None:
        self._run_dir, self._identify = run_dir, identify
        self._max_in_a_row, self._spike_guard = max_in_a_row, spike_guard
        self._in_a_row = 0
        self._norms: deque[float] = deque(maxlen=WINDOW)
        # Of the batches of a step: the samples of their rows, and whether their loss is finite.
        self._batches: list[tuple[Tensor, Tensor]] = []

    def state_dict(self) -> dict[str, Any]:
        """The bad steps in a row, and the gradient norms of the last steps that were made."""
        return {"in_a_row": self._in_a_row, "norms": list(self._norms)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes them up."""
        self._in_a_row = state_dict["in_a_row"]
        self._norms.extend(state_dict["norms"])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Drops lines of steps that come again, and sets the limit of the gradient norm."""
        assert isinstance(pl_module, LanguageModeling)
        pl_module.largest_norm = self._largest_norm()
        path = self._run_dir / BAD_BATCHES
        if trainer.is_global_zero and path.is_file():
            self._drop_after(trainer.global_step, path)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Looks at the step when it is complete.

        Raises:
            TrainingDivergedError: there were too many bad ones in a row.
        """
        assert isinstance(pl_module, LanguageModeling)
        self._batches.append((batch.samples_B, outputs["is_finite"]))
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        if pl_module.is_left_out:
            self._in_a_row += 1
            self._report(trainer, pl_module, batch)
        else:
            self._in_a_row = 0
            if self._spike_guard is not None:
                self._norms.append(float(pl_module.gradient_norm))
                pl_module.largest_norm = self._largest_norm()
        self._batches = []

    def _drop_after(self, step: int, path: Path) -> None:
        try:
            lines = path.read_text(errors="replace").splitlines(keepends=True)
            kept = [line for line in lines if _step_of(line) <= step]
            if kept != lines:
                with complete_file(path, overwrite=True) as temporary:
                    temporary.write_text("".join(kept))
        except (OSError, OutputError) as error:
            warnings.warn(f"{path} has lines of steps that come again: {error}", stacklevel=2)

    def _largest_norm(self) -> float:
        if self._spike_guard is None or len(self._norms) < WINDOW:
            return math.inf
        return self._spike_guard * median(self._norms)

    def _report(self, trainer: pl.Trainer, module: LanguageModeling, batch: Batch) -> None:
        """Writes what is known of a bad step, on rank 0; all ranks take part."""
        reason = self._reason(module)
        samples = [n for part in _of_all_ranks(self._own_samples(module)) for n in part]
        if trainer.is_global_zero:
            accessions = [self._identify(number) for number in samples]
            norm = float(module.gradient_norm)
            line = {
                "step": trainer.global_step,
                "reason": reason,
                "gradient_norm": norm if math.isfinite(norm) else None,
                "epoch": batch.after[0],
                "samples": batch.after[1],
                "accessions": accessions,
            }
            self._write(json.dumps(line))
            shown = ", ".join(accessions[:3]) + (", ..." if len(accessions) > 3 else "")
            warnings.warn(
                f"step {trainer.global_step} was left out: {reason} ({len(accessions)} samples: "
                f"{shown})",
                stacklevel=2,
            )
        if self._in_a_row >= self._max_in_a_row:
            newest = latest(self._run_dir)
            raise TrainingDivergedError(
                f"{self._in_a_row} steps in a row were left out, of the last one {reason}; "
                f"{self._run_dir / BAD_BATCHES} has their samples, and the last good checkpoint is "
                f"{newest or 'none'}: train with a lower optimizer.learning_rate in another "
                "run_dir=, or type a larger trainer.max_bad_steps"
            )

    def _reason(self, module: LanguageModeling) -> str:
        if module.num_bad_losses:
            return "the loss is not finite"
        norm = float(module.gradient_norm)
        if not math.isfinite(norm):
            return "the gradient is not finite"
        usual = module.largest_norm / (self._spike_guard or 1)
        return f"the gradient norm is {norm:.3g}, where {usual:.3g} is usual"

    def _own_samples(self, module: LanguageModeling) -> list[int]:
        """This rank's samples of the step: of the batches whose loss is bad, if there are any."""
        return [
            number
            for samples_B, is_finite in self._batches
            if not (module.num_bad_losses and is_finite)
            for number in samples_B.tolist()
            if number != FILLER
        ]

    def _write(self, line: str) -> None:
        path = self._run_dir / BAD_BATCHES
        try:
            with path.open("a") as file:
                file.write(line + "\n")
        except OSError as error:
            warnings.warn(f"{path} cannot be written: {error.strerror}", stacklevel=2)


def _of_all_ranks(samples: list[int]) -> list[list[int]]:
    if not torch.distributed.is_initialized():
        return [samples]
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, samples)
    return parts


def _step_of(line: str) -> float:
    """The step that a line is about; none, if the process was killed while it wrote the line."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf
