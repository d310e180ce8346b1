"""Skipped steps: a loss or gradient that is not finite, or a gradient far larger than usual.

`LanguageModeling.on_before_optimizer_step` skips a step on all ranks: weights, optimizer and
schedule do not change. The step still counts as a step of the run: its data are consumed, and it
has a number in the log and among the checkpoints.
"""

import json
import math
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from torch import Tensor

from protlm.checkpoints.format import latest
from protlm.data.dataset import Batch
from protlm.system.errors import TrainingDivergedError
from protlm.system.paths import complete_file
from protlm.training.callbacks.hooks import LoopCallback, of_all_ranks
from protlm.training.module import Training

BAD_BATCHES = "bad_batches.jsonl"
# Number of previous steps whose gradient norms a spike is compared with.
WINDOW = 100


class SkipBadSteps(LoopCallback):
    """Records the samples of skipped steps, and ends a run with too many of them in a row.

    It also sets the module's largest gradient norm: `max_gradient_norm_ratio` times the median of
    the last 100 steps that were not skipped, once there are 100.
    """

    def __init__(
        self,
        run_dir: Path,
        identify: Callable[[int], str],
        *,
        max_in_a_row: int,
        max_gradient_norm_ratio: float | None,
    ) -> None:
        self._run_dir, self._identify = run_dir, identify
        self._max_in_a_row, self._max_ratio = max_in_a_row, max_gradient_norm_ratio
        self._in_a_row = 0
        self._norms: deque[float] = deque(maxlen=WINDOW)
        # The samples of each batch of a step, and whether its loss is finite.
        self._batches: list[tuple[Tensor, Tensor]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self._in_a_row, "norms": list(self._norms)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._in_a_row = state_dict["in_a_row"]
        self._norms.extend(state_dict["norms"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Removes lines of steps that are repeated, and sets the largest gradient norm."""
        assert isinstance(pl_module, Training)
        pl_module.largest_norm = self._largest_norm()
        path = self._run_dir / BAD_BATCHES
        if trainer.is_global_zero and path.is_file():
            lines = path.read_text(errors="replace").splitlines(keepends=True)
            kept = [line for line in lines if _step_of(line) <= trainer.global_step]
            if kept != lines:
                with complete_file(path, overwrite=True) as temporary:
                    temporary.write_text("".join(kept))

    def on_batch_end(self, trainer: Trainer, outputs: Any, batch: Batch) -> None:
        self._batches.append((batch.joined_N, outputs["is_finite"]))

    def on_step_end(self, trainer: Trainer, module: Training, batch: Batch) -> None:
        if module.is_skipped:
            self._in_a_row += 1
            self._report(trainer, module, batch)
        else:
            self._in_a_row = 0
            if self._max_ratio is not None:
                self._norms.append(float(module.gradient_norm))
                module.largest_norm = self._largest_norm()
        self._batches = []

    def _largest_norm(self) -> float:
        if self._max_ratio is None or len(self._norms) < WINDOW:
            return math.inf
        return self._max_ratio * median(self._norms)

    def _report(self, trainer: Trainer, module: Training, batch: Batch) -> None:
        """Writes the line of a skipped step on rank 0; all ranks must call this."""
        reason = self._reason(module)
        # Of batches with a bad loss, if there are any.
        own = [
            number
            for joined_N, is_finite in self._batches
            if not (module.num_bad_losses and is_finite)
            for number in joined_N.tolist()
        ]
        samples = [number for part in of_all_ranks(own) for number in part]
        if trainer.is_global_zero:
            accessions = [self._identify(number) for number in samples]
            norm = float(module.gradient_norm)
            self._write(
                {
                    "step": trainer.global_step,
                    "reason": reason,
                    "gradient_norm": norm if math.isfinite(norm) else None,
                    "epoch": batch.after[0],
                    "samples": batch.after[1],
                    "accessions": accessions,
                }
            )
            shown = ", ".join(accessions[:3]) + (", ..." if len(accessions) > 3 else "")
            warnings.warn(
                f"step {trainer.global_step} was skipped: {reason} ({len(accessions)} samples: "
                f"{shown})",
                stacklevel=2,
            )
        if self._in_a_row >= self._max_in_a_row:
            advice = "train with a lower optimizer.learning_rate in another run_dir="
            if math.isfinite(module.largest_norm):
                advice += (
                    ", or, if its scale has changed for good, continue with a larger "
                    "trainer.max_gradient_norm_ratio, or null"
                )
            raise TrainingDivergedError(
                f"{self._in_a_row} steps in a row were skipped (last reason: {reason}); "
                f"{self._run_dir / BAD_BATCHES} lists their samples; the last good checkpoint is "
                f"{latest(self._run_dir) or 'none'}: {advice}"
            )

    def _reason(self, module: Training) -> str:
        if module.num_bad_losses:
            return "the loss is not finite"
        norm = float(module.gradient_norm)
        if not math.isfinite(norm):
            return "the gradient is not finite"
        usual = module.largest_norm / (self._max_ratio or 1)
        return f"the gradient norm is {norm:.3g}, where {usual:.3g} is usual"

    def _write(self, line: dict[str, Any]) -> None:
        path = self._run_dir / BAD_BATCHES
        try:
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            warnings.warn(f"{path} cannot be written: {error.strerror}", stacklevel=2)


def _step_of(line: str) -> float:
    """Returns the step of a line, or infinity if the line is truncated."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return math.inf
