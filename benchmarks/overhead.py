"""Measures what the trainer, the loader and the logs add to a bare loop of the same model.

make bench-overhead, or: python -m benchmarks.overhead [--stretches 12] [SETTING=VALUE ...]

A run of `protlm train` stops its clock after every few steps and lets a bare loop, with a copy of
the model and an optimiser of its own, make as many steps on the same batches: forward, backward,
gradient norm and clipping, optimiser. Both do the same mathematics, in the same minutes.
"""

import argparse
import copy
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from benchmarks.data import Bar, bar_table
from benchmarks.heap import keep_freed_memory
from data_prep.prepare import prepare
from data_prep.split import HashSplit
from protlm.build import build_data, build_module, build_network, compose, open_data
from protlm.config import TrainConfig
from protlm.data.dataset import Batch
from protlm.errors import exit_with_message
from protlm.model.objective import target_sums
from protlm.paths import sample_dir
from protlm.training.module import LanguageModeling
from protlm.training.run import train

STEPS_OF_A_STRETCH = 10
MOST_OVERHEAD = 0.03


class BareLoop:
    """Forward, backward, clipping and optimiser step, and nothing else.

    Args:
        module: a module of its own, which is trained.
        config: of the run.
    """

    def __init__(self, module: LanguageModeling, config: TrainConfig) -> None:
        self.module, self._clip = module.train(), config.trainer.gradient_clip
        self._is_mixed = config.trainer.precision == "bf16-mixed"
        self._optimizer: torch.optim.Optimizer = module.configure_optimizers()["optimizer"]

    def seconds(self, batches: Sequence[Batch]) -> float:
        """Trains on the batches."""
        start = time.perf_counter()
        for batch in batches:
            self._optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._is_mixed):
                out = self.module.network(batch.tokens_BL, batch.mask_BL, causal=False)
                sums = target_sums(out.logits_BLV, batch.targets_BL)
            (sums.nats / sums.count).backward()
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self._clip)
            self._optimizer.step()
        return time.perf_counter() - start


@dataclass
class Stretches:
    """The seconds of stretches of steps, each by the trainer and by the bare loop."""

    bare: BareLoop
    trainer_seconds: list[float] = field(default_factory=list)
    bare_seconds: list[float] = field(default_factory=list)
    _batches: list[Batch] = field(default_factory=list)
    _start: float | None = None

    def after_step(self, batch: Batch) -> None:
        """Takes a step down; at the end of a stretch the bare loop has its turn."""
        self._batches.append(batch)
        if len(self._batches) < STEPS_OF_A_STRETCH:
            return
        now = time.perf_counter()
        # The first stretch has no beginning: it warms both up.
        if self._start is not None:
            self.trainer_seconds.append(now - self._start)
        seconds = self.bare.seconds(self._batches)
        if self._start is not None:
            self.bare_seconds.append(seconds)
        self._batches.clear()
        self._start = time.perf_counter()

    @property
    def overhead(self) -> float:
        """What the trainer adds, as a share of the bare loop's time: the median of all pairs."""
        pairs = zip(self.trainer_seconds, self.bare_seconds, strict=True)
        return median(trainer / bare for trainer, bare in pairs) - 1


def measure(module: LanguageModeling, config: TrainConfig) -> Stretches:
    """Trains a module as `protlm train` does, with a bare loop of its copy beside it."""
    stretches = Stretches(BareLoop(copy.deepcopy(module), config))

    def after_step(outputs: Any, batch: Batch, batch_idx: int) -> None:
        stretches.after_step(batch)

    # Lightning calls it when all callbacks are done with a step.
    module.on_train_batch_end = after_step
    data = build_data(*open_data(config.data), config)
    train(module, data, config=config.trainer, logger=config.logger, run_dir=Path(config.run_dir))
    return stretches


def settings(folder: Path, stretches: int, overrides: Sequence[str]) -> TrainConfig:
    """The run that is measured: the `small` model on the shipped sample, logs as they are."""
    steps = (stretches + 1) * STEPS_OF_A_STRETCH
    given = [
        "model=small",
        f"data.dir={folder / 'data'}",
        f"run_dir={folder / 'run'}",
        "trainer.accelerator=cpu",
        f"trainer.max_steps={steps}",
        # Neither belongs to a step.
        f"trainer.valid_every={steps}",
        "trainer.valid_batches=1",
        f"trainer.checkpoint_every={steps}",
    ]
    return compose(TrainConfig, [*given, *overrides])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Measure the overhead of the trainer.")
    parser.add_argument("settings", nargs="*", help="of protlm train, such as model=tiny")
    parser.add_argument("--stretches", type=int, default=12)
    parser.add_argument(
        "--fasta", type=Path, default=sample_dir() / "uniprot_sample.fasta.gz", help="what to read"
    )
    return parser.parse_args(arguments)


def main() -> None:
    """Measures, and prints what was asked beside it."""
    arguments = parse()
    keep_freed_memory()
    with tempfile.TemporaryDirectory(prefix="protlm-bench-") as name:
        folder = Path(name)
        prepare([arguments.fasta], folder / "data", split_rule=HashSplit(0.05, 0.05))
        config = settings(folder, arguments.stretches, arguments.settings)
        network = build_network(config.model, config.attention, seed=config.seed)
        stretches = measure(build_module(network, config), config)
    for label, seconds in (
        ("trainer", stretches.trainer_seconds),
        ("bare loop", stretches.bare_seconds),
    ):
        step = median(seconds) / STEPS_OF_A_STRETCH * 1000
        print(f"{label}: {step:.1f} ms a step", file=sys.stderr)
    percent = 100 * stretches.overhead
    bar = Bar("overhead of the trainer", 100 * MOST_OVERHEAD, percent, " %", at_most=True)
    Console().print(bar_table([bar]))


if __name__ == "__main__":
    exit_with_message(main)
