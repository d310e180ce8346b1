"""Which options of the training recipe pay: one short run for each, with equal tokens.

    python -m studies.recipe DATA [--steps 1000] [--jobs 2] [--out runs/recipe]

Every run starts from the same seed, sees the same batches and masks, and differs from the base in
what its name says. Runs that are there already are not repeated, and interrupted ones continue.
Short runs invert ranks: a difference below the spread of the seeds says nothing.
"""

import argparse
import csv
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import exp
from pathlib import Path

BASE = (
    "model=medium",
    "model.convolution=null",
    "model.value_embedding=false",
    "model.unet_skips=false",
    "objective=mask_only",
    "schedule=wsd_linear",
    "schedule.warmup_steps=100",
    "optimizer.learning_rate=3e-3",
    "optimizer.beta2=0.99",
    "data.crop=random",
    "data.max_length=512",
    "data.tokens_per_batch=4096",
    "data.verify=sizes",
    "trainer.gradient_clip=1.0",
    "trainer.log_every=50",
)
SMALL = ("model.model_dim=128", "model.feedforward_dim=344")
LARGE = ("model.model_dim=256", "model.feedforward_dim=688")
EXTRAS = ("model.convolution=5", "model.value_embedding=true", "model.unet_skips=true")
OPTIONS: dict[str, tuple[str, ...]] = {
    "base": (),
    "convolution": ("model.convolution=5",),
    "value embedding": ("model.value_embedding=true",),
    "U-net skips": ("model.unet_skips=true",),
    "output gate": ("model.output_gate=true",),
    "QK-norm": ("model.qk_norm=true",),
    "Muon": ("optimizer=muon",),
    "rate 1.5e-3": ("optimizer.learning_rate=1.5e-3",),
    "rate 6e-3": ("optimizer.learning_rate=6e-3",),
    "weight decay 0.3": ("optimizer.weight_decay=0.3",),
    "second moment: half-life of 10 M tokens": ("optimizer.beta2_half_life=1e7",),
    "masked 80/10/10": ("objective=masked",),
    "masked 10 to 30 %, then 15 %": (
        "objective.mask_fraction_range=[0.1,0.3]",
        "objective.mask_fraction_decays=true",
    ),
    "all three extras, Muon": (*EXTRAS, "optimizer=muon"),
    "all three extras, Muon, seed 1": (*EXTRAS, "optimizer=muon", "seed=1"),
    "base, seed 1": ("seed=1",),
}
BOTH_ARMS = ("base", "convolution", "QK-norm", "Muon", "all three extras, Muon")


@dataclass(frozen=True)
class Arm:
    """A run: the mechanism, the size, what differs from the base, and where it is."""

    attention: str
    size: str
    option: str
    folder: Path

    def overrides(self, data: Path, steps: int) -> list[str]:
        """What `protlm train` is given; choices of groups come before their values."""
        size = {"small": SMALL, "medium": (), "large": LARGE}[self.size]
        given = [*BASE, *size, *OPTIONS[self.option]]
        ends = f"trainer.max_steps={steps} trainer.valid_every={steps} trainer.checkpoint_every=200"
        run = [f"attention={self.attention}", f"data.dir={data}", f"run_dir={self.folder}"]
        given += [*run, *ends.split()]
        # Of two values for one setting the later counts.
        last = {override.split("=")[0]: override for override in given}
        return sorted(last.values(), key=lambda override: "." in override.split("=")[0])


def arms(out: Path) -> Iterator[Arm]:
    """All runs, the most telling first."""

    def arm(attention: str, size: str, option: str) -> Arm:
        name = re.sub(r"[^\w.-]+", "_", f"{attention}-{size}-{option}")
        return Arm(attention, size, option, out / name)

    for option in OPTIONS:
        yield arm("performer_relu", "small", option)
        if option in BOTH_ARMS:
            yield arm("softmax", "small", option)
    for size in ("medium", "large"):
        for attention in ("performer_relu", "softmax"):
            yield arm(attention, size, "all three extras, Muon")


def train(arm: Arm, data: Path, steps: int, threads: int) -> None:
    """Makes or continues a run in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "protlm.train", *arm.overrides(data, steps)]
    arm.folder.parent.mkdir(parents=True, exist_ok=True)
    with arm.folder.with_suffix(".log").open("w") as log:
        code = subprocess.run(
            command, env=environment, stdout=log, stderr=log, check=False
        ).returncode
    if code:
        print(f"{arm.folder}: ended with {code}, see {arm.folder}.log", file=sys.stderr)


def table(done: list[Arm]) -> str:
    """The last validation of every run as a table in Markdown."""
    lines = [
        "| mechanism | size | option | loss | perplexity | residue frequencies | residues/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm in done:
        path = arm.folder / "metrics.csv"
        rows = list(csv.DictReader(path.open())) if path.is_file() else []
        valid = [row for row in rows if row["valid_loss"]]
        rates = sorted(float(row["residues_per_second"]) for row in rows if row["train_loss"])
        if valid:
            loss = float(valid[-1]["valid_loss"])
            unigram = exp(float(valid[-1]["valid_unigram_loss"]))
            lines.append(
                f"| {arm.attention} | {arm.size} | {arm.option} | {loss:.4f} | {exp(loss):.2f} "
                f"| {unigram:.2f} | {rates[len(rates) // 2]:,.0f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Runs what is missing, and prints the table."""
    parser = argparse.ArgumentParser(description="Which options of the training recipe pay.")
    parser.add_argument("data", type=Path, help="a data set with the splits train and valid")
    parser.add_argument("--steps", type=int, default=1000, help="of 4,096 tokens each")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, of one thread each")
    parser.add_argument("--out", type=Path, default=Path("runs/recipe"))
    given = parser.parse_args()
    wanted = list(arms(given.out))
    with ThreadPoolExecutor(given.jobs) as pool:
        threads = max((os.cpu_count() or 1) // given.jobs, 1)
        list(pool.map(lambda arm: train(arm, given.data, given.steps, threads), wanted))
    print(table(wanted))


if __name__ == "__main__":
    main()
