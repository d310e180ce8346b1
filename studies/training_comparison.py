"""Trains the same small model with every mechanism, with the same seed and data order.

make compare-mechanisms, or: python -m studies.training_comparison [--steps 300] [--quick] [...]

Each run is a `protlm train` in FOLDER/NAME-STEPS; a finished run is not repeated. The program ends
at a gradient that is not finite; the table then gives the number of steps before it.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

from matplotlib.figure import Figure
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from benchmarks.figures import styles
from protlm.attention import mechanism, names
from protlm.data_prep import prepare, split
from protlm.plots import save_figure
from protlm.system.errors import InputDataError, exit_with_message
from protlm.system.json_file import write_json
from protlm.system.paths import complete_file, sample_dir
from studies.runs import log

STEPS, QUICK_STEPS, LOG_EVERY = 300, 20, 10
# A run of so few steps only tests the script.
QUICK = ("model=tiny", "trainer.valid_batches=2")
# The last of the steps are averaged.
SHARE_AT_THE_END = 6
# With their shipped options, these two would see nearly all of the model's 512 positions.
NARROWER = {"bigbird": ("block_size=16",), "longformer": ("window=64",)}


@dataclass(frozen=True)
class Trained:
    """How a run ended, and the peak memory of its process."""

    name: str
    steps: int
    peak_bytes: int
    exit_code: int


@dataclass(frozen=True)
class Curve:
    """The log of a run, by step."""

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    rates: tuple[float, ...]
    valid_loss: float | None
    valid_perplexity: float | None

    @classmethod
    def read(cls, run: Path) -> "Curve":
        """Reads the log of a run."""
        rows = log(run)
        logged = [row for row in rows if "train_loss" in row]
        valid = [row for row in rows if "valid_loss" in row]
        return cls(
            steps=tuple(int(row["step"]) for row in logged),
            losses=tuple(row["train_loss"] for row in logged),
            rates=tuple(row["residues_per_second"] for row in logged),
            valid_loss=valid[-1]["valid_loss"] if valid else None,
            valid_perplexity=valid[-1]["valid_perplexity"] if valid else None,
        )

    @property
    def final_loss(self) -> float:
        """The final loss is the mean of the last sixth of the steps, or infinite without any."""
        if not self.losses:
            return math.inf
        return fmean(self.losses[-max(len(self.losses) // SHARE_AT_THE_END, 1) :])


def run_dir(name: str, folder: Path, steps: int) -> Path:
    """Returns the folder of a run."""
    return folder / f"{name}-{steps}"


def settings(name: str, folder: Path, steps: int) -> list[str]:
    """Returns the settings of a run, which differ in the attention and the folder only."""
    objective = "masked" if mechanism(name).supports_bidirectional else "causal"
    return [
        "schedule=cosine",
        "optimizer.learning_rate=3e-3",
        "data.tokens_per_batch=4096",
        *(QUICK if steps <= QUICK_STEPS else ("model=small",)),
        f"attention={name}",
        *(f"attention.{option}" for option in NARROWER.get(name, ())),
        f"objective={objective}",
        f"data.dir={folder / 'data'}",
        f"run_dir={run_dir(name, folder, steps)}",
        f"trainer.max_steps={steps}",
        # Fewer for short runs.
        f"schedule.warmup_steps={min(100, steps // 2)}",
        f"trainer.log_every={LOG_EVERY}",
        f"trainer.valid_every={steps}",
        f"trainer.checkpoint_every={steps}",
    ]


def prepare_sample(folder: Path) -> None:
    """Makes shards of the shipped sample, unless they are there."""
    if not (folder / "data" / "manifest.json").exists():
        rule = split.TableSplit(sample_dir() / "uniprot_sample.splits.tsv.gz")
        fasta = sample_dir() / "uniprot_sample.fasta.gz"
        prepare.prepare([fasta], folder / "data", split_rule=rule)


def train(name: str, folder: Path, steps: int) -> Trained:
    """Trains with a mechanism, unless the run is finished.

    Raises:
        InputDataError: the run failed for another reason than a gradient that is not finite.
    """
    run = run_dir(name, folder, steps)
    record, log = run.with_name(f"{run.name}.json"), run.with_name(f"{run.name}.log")
    if record.exists():
        return Trained(**json.loads(record.read_text()))
    print(f"{name} ...", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "protlm", "train", *settings(name, folder, steps)]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        # This returns the memory of the child, which subprocess does not.
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode and "is not finite" not in log.read_text():
        raise InputDataError(f"the run of {name} failed: see {log}")
    unit = 1 if sys.platform == "darwin" else 1024
    trained = Trained(name, steps, usage.ru_maxrss * unit, process.returncode)
    write_json(record, asdict(trained))
    return trained


def comparison_table(runs: Sequence[tuple[Trained, Curve]]) -> Table:
    """Returns the table of all runs, the lowest loss first and causal ones at the end."""
    columns = ("mechanism", "objective", "training loss", "validation loss", "perplexity")
    table = Table(*columns, "residues/s", "peak memory, GB", "non-finite steps", box=MARKDOWN)
    for trained, curve in sorted(runs, key=lambda run: (_is_causal(run[0]), run[1].final_loss)):
        reached = curve.steps[-1] if curve.steps else 0
        table.add_row(
            _label(trained),
            "causal" if _is_causal(trained) else "masked",
            f"{curve.final_loss:.3f}",
            "" if curve.valid_loss is None else f"{curve.valid_loss:.3f}",
            "" if curve.valid_perplexity is None else f"{curve.valid_perplexity:.2f}",
            f"{median(curve.rates):,.0f}" if curve.rates else "",
            f"{trained.peak_bytes / 1e9:.2f}",
            f"ended after {reached} of {trained.steps}" if trained.exit_code else "0",
        )
    return table


def curves_figure(runs: Sequence[tuple[Trained, Curve]]) -> Figure:
    """Draws the training loss of all runs, smoothed over five points."""
    drawn = Figure(figsize=(9.0, 5.0), layout="constrained")
    axes = drawn.subplots()
    looks = styles(sorted(trained.name for trained, _ in runs))
    for trained, curve in sorted(runs, key=lambda run: run[1].final_loss, reverse=True):
        color, marker = looks[trained.name]
        smooth = [
            fmean(curve.losses[max(end - 4, 0) : end + 1]) for end in range(len(curve.losses))
        ]
        axes.plot(
            curve.steps,
            smooth,
            color=color,
            marker=marker,
            markersize=3,
            markevery=5,
            linewidth=2.2 if trained.name == "softmax" else 1.1,
            label=f"{_label(trained)}{' (causal)' if _is_causal(trained) else ''}",
        )
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (nats per masked residue)")
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    drawn.legend(loc="outside right upper", frameon=False, fontsize=8)
    return drawn


def _is_causal(trained: Trained) -> bool:
    return not mechanism(trained.name).supports_bidirectional


def _label(trained: Trained) -> str:
    return " ".join((trained.name, *NARROWER.get(trained.name, ())))


def main() -> None:
    """Trains with every mechanism, and prints and writes the table and the curves.

    Raises:
        InputDataError: a run failed.
    """
    parser = argparse.ArgumentParser(description="Train a small model with every mechanism.")
    parser.add_argument("--steps", type=int, help=f"up to {QUICK_STEPS}: of a tiny model")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps")
    parser.add_argument("--mechanisms", nargs="+", choices=names(), default=names())
    parser.add_argument("--folder", type=Path, default=Path("outputs/compare"))
    arguments = parser.parse_args()
    folder, steps = arguments.folder, arguments.steps or (QUICK_STEPS if arguments.quick else STEPS)
    folder.mkdir(parents=True, exist_ok=True)
    prepare_sample(folder)
    runs = []
    for name in arguments.mechanisms:
        trained = train(name, folder, steps)
        runs.append((trained, Curve.read(run_dir(name, folder, steps))))
    table = comparison_table(runs)
    Console(width=160).print(table)
    page = complete_file(folder / "table.md", overwrite=True)
    with page as temporary, temporary.open("w") as file:
        Console(file=file, width=200).print(table)
    save_figure(curves_figure(runs), folder / "curves.png", overwrite=True)
    print(f"Wrote {folder / 'table.md'} and {folder / 'curves.png'}")


if __name__ == "__main__":
    exit_with_message(main)
