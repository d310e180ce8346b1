"""Measures what the trainer, the loader and the logs add to a bare loop.

make bench-overhead, or: python -m benchmarks.overhead [--quick] [SETTING=VALUE ...]

A run of `protlm train` pauses after every few steps, and a bare loop with a copy of the model and
its own optimizer takes as many steps on the same batches: forward, backward, gradient norm and
clipping, optimizer. So both do the same mathematics and take turns.
"""

import copy
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import CPU, Comparison, median_table, options, report, speed_table
from benchmarks.language_models import mean_loss, training_step
from protlm.build import build_data, build_training
from protlm.config import TrainConfig, TrainerConfig
from protlm.config.composition import compose
from protlm.data.dataset import Batch
from protlm.data_prep import prepare, split
from protlm.system.errors import exit_with_message
from protlm.system.paths import sample_dir
from protlm.training.module import LanguageModeling
from protlm.training.run import train
from protlm.training.run_plan import RunPlan

TRAINER, BARE = "trainer", "bare loop"
STRETCHES, QUICK_STRETCHES = 12, 2
# Trainer and bare loop take turns after this number of steps.
STEPS, QUICK_STEPS = 10, 2


class BareLoop:
    """A loop of forward, backward, clipping and the optimizer's step, and nothing else.

    Args:
        module: a copy of the module, which the loop trains.
        trainer: the settings of the run.
    """

    def __init__(self, module: LanguageModeling, trainer: TrainerConfig) -> None:
        self.module, self._clip = module.train(), trainer.gradient_clip
        self._is_mixed = trainer.precision == "bf16-mixed"
        self._optimizer: torch.optim.Optimizer = module.configure_optimizers()["optimizer"]

    def seconds(self, batches: Sequence[Batch]) -> float:
        """Trains on the batches and returns the time it took."""
        start = time.perf_counter()
        for batch in batches:
            loss = partial(mean_loss, self.module.network, batch)
            training_step(
                loss,
                self.module,
                self._optimizer,
                device=CPU,
                is_mixed=self._is_mixed,
                clip=self._clip,
            )
        return time.perf_counter() - start


@dataclass
class Stretches:
    """Records the seconds per step of trainer and bare loop, one turn after the other.

    Attributes:
        bare: the bare loop.
        steps: the number of steps of a stretch.
        costs: the seconds per step of each stretch.
    """

    bare: BareLoop
    steps: int
    costs: dict[str, list[float]] = field(default_factory=lambda: {TRAINER: [], BARE: []})
    _batches: list[Batch] = field(default_factory=list)
    _start: float | None = None

    def after_step(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Records a step of the trainer; at the end of a stretch the bare loop has its turn."""
        self._batches.append(batch)
        if len(self._batches) < self.steps:
            return
        trainer = time.perf_counter() - (self._start or 0.0)
        bare = self.bare.seconds(self._batches)
        # The start of the first turn is unknown; it warms both up.
        if self._start is not None:
            self.costs[TRAINER].append(trainer / self.steps)
            self.costs[BARE].append(bare / self.steps)
        self._batches.clear()
        self._start = time.perf_counter()


def measure(module: LanguageModeling, plan: RunPlan, steps: int) -> Stretches:
    """Trains a module as `protlm train` does, in turns with a bare loop on its copy."""
    stretches = Stretches(BareLoop(copy.deepcopy(module), plan.trainer), steps)
    # Lightning calls it when all callbacks have finished a step.
    module.on_train_batch_end = stretches.after_step
    data = build_data(plan)
    train(module, data, plan, checkpoint=None)
    return stretches


def settings(folder: Path, steps: int, overrides: Sequence[str]) -> RunPlan:
    """Returns the measured run: the `small` model on the shipped sample, with its usual logs."""
    given = [
        "model=small",
        f"data.dir={folder / 'data'}",
        f"run_dir={folder / 'run'}",
        "trainer.accelerator=cpu",
        f"trainer.max_steps={steps}",
        # Validation and checkpoints are not part of a step.
        f"trainer.valid_every={steps}",
        "trainer.valid_batches=1",
        f"trainer.checkpoint_every={steps}",
    ]
    return RunPlan(compose(TrainConfig, [*given, *overrides]))


def main() -> None:
    """Measures, prints the tables, and writes the JSON file."""
    parser = options("benchmark_overhead", "the overhead of the trainer")
    parser.add_argument("settings", nargs="*", help="settings of protlm train, such as model=tiny")
    parser.add_argument(
        "--fasta", type=Path, default=sample_dir() / "uniprot_sample.fasta.gz", help="the proteins"
    )
    arguments = parser.parse_args()
    stretches, steps = (QUICK_STRETCHES, QUICK_STEPS) if arguments.quick else (STRETCHES, STEPS)
    with tempfile.TemporaryDirectory(prefix="protlm-bench-") as name:
        folder = Path(name)
        prepare.prepare([arguments.fasta], folder / "data", split_rule=split.HashSplit(0.05, 0.05))
        plan = settings(folder, (stretches + 1) * steps, arguments.settings)
        measured = measure(build_training(plan), plan, steps)
    held = [Comparison("a step", measured.costs)]
    tables = speed_table("Training", held, BARE), median_table("Milliseconds", held)
    report(arguments.json, {"overhead": held}, (BARE,), *tables)
    if ratio := held[0].speed(BARE, TRAINER):
        print(f"The trainer adds {ratio.median - 1:.1%} to the bare loop")


if __name__ == "__main__":
    exit_with_message(main)
