"""Twins: what linear attention costs or gains on proteins, everything else being equal.

    python -m studies.twins TRAIN TEST [--steps 5000] [--seeds 0 1] [--out runs/twins]

For each objective and seed a model with `performer_relu` and one with `softmax` see the same
batches and masks, start from the same weights and have the same extras. Both keep the peak of the
learning rate, and decay over the last 40 % of their steps: once after equal tokens, and the
Performer once more, from the same stable phase, after the wall time that the softmax model took.
Finished runs are not repeated, and interrupted ones continue. Before them each mechanism runs short
at several learning rates, and keeps the one with the lowest validation loss.

Wall times are sums over the steps in the log, so nothing else may run beside; where something does,
give the ratio of the times of a step, measured on the idle machine (`--time-ratio`).
"""

import argparse
import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

TOKENS_PER_STEP = 4096
DECAY = 0.4
COMMON = (
    "model=medium",
    "model.model_dim=128",
    "model.feedforward_dim=344",
    "optimizer=muon",
    "schedule=wsd_linear",
    "optimizer.beta2_half_life=1e7",
    "data.sampling=cluster",
    "data.crop=random",
    "data.max_length=512",
    f"data.tokens_per_batch={TOKENS_PER_STEP}",
    "data.verify=sizes",
    "trainer.gradient_clip=1.0",
    "trainer.log_every=50",
    "trainer.keep_checkpoints=100",
)
RATES = (1.5e-3, 3e-3, 6e-3)
RATE_STEPS = 600
OBJECTIVES = {"masked": "mask_only", "causal": "causal"}
RESAMPLES = 1000


@dataclass(frozen=True)
class Arm:
    """A run: objective, mechanism, seed, and whether it has equal tokens or equal time."""

    objective: str
    attention: str
    seed: int
    budget: str = "tokens"

    def folder(self, out: Path) -> Path:
        """Where the run is."""
        return out / f"{self.objective}-{self.attention}-{self.seed}-{self.budget}"


def arms(seeds: list[int]) -> Iterator[Arm]:
    """The runs with equal tokens."""
    for seed in seeds:
        for objective in OBJECTIVES:
            yield Arm(objective, "performer_relu", seed)
            yield Arm(objective, "softmax", seed)
    yield Arm("masked", "performer_softmax", seeds[0])


def train(arm: Arm, given: argparse.Namespace, steps: int, rate: float) -> None:
    """Makes or continues a run; ends the study if it fails."""
    planned = min(steps, given.steps)
    stable = round((1 - DECAY) * planned)
    command = [
        *(sys.executable, "-m", "protlm.train", f"attention={arm.attention}"),
        f"objective={OBJECTIVES[arm.objective]}",
        *COMMON,
        f"optimizer.learning_rate={rate}",
        *(f"data.dir={given.train}", f"data.valid_dir={given.test}", f"seed={arm.seed}"),
        *(f"trainer.max_steps={steps}", f"trainer.valid_every={max(planned // 10, 1)}"),
        *(f"trainer.checkpoint_every={stable}", "trainer.checkpoint_minutes=10"),
        "trainer.valid_batches=100",
        f"run_dir={arm.folder(given.out)}",
    ]
    subprocess.run(command, check=True)


def best_rate(attention: str, given: argparse.Namespace) -> float:
    """Returns the learning rate with the lowest validation loss after short masked runs."""
    steps = min(RATE_STEPS, given.steps)
    losses = {}
    for rate in RATES:
        arm = Arm("masked", attention, given.seeds[0], f"rate-{rate}")
        train(arm, given, steps, rate)
        with (arm.folder(given.out) / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["valid_loss"]]
        losses[rate] = float(rows[-1]["valid_loss"])
    print(f"{attention}: validation loss by learning rate {losses}", flush=True)
    return min(losses, key=losses.__getitem__)


def time_ratio(arm: Arm, given: argparse.Namespace) -> float:
    """Returns how many times as long a step of the softmax model takes."""
    if given.time_ratio:
        return given.time_ratio[list(OBJECTIVES).index(arm.objective)]
    twin = Arm(arm.objective, "softmax", arm.seed).folder(given.out)
    return seconds(twin) / seconds(arm.folder(given.out))


def seconds(folder: Path) -> float:
    """Wall time of the training steps of a run, validations and starts not counted."""
    with (folder / "metrics.csv").open() as file:
        return sum(float(row["seconds"]) for row in csv.DictReader(file) if row["seconds"])


def branch(arm: Arm, given: argparse.Namespace) -> None:
    """Copies the stable phase of a run, which continues from there to other steps."""
    source = Arm(arm.objective, arm.attention, arm.seed).folder(given.out)
    target = arm.folder(given.out)
    if target.exists():
        return
    stable = round((1 - DECAY) * given.steps)
    unfinished = target.with_name(f"{target.name}.copy")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(source, unfinished)
    (unfinished / "checkpoints" / "latest").write_text(f"step-{stable:08d}.ckpt\n")
    unfinished.rename(target)


def evaluate(arm: Arm, given: argparse.Namespace, splits: list[str]) -> Path:
    """Evaluates a run on all splits; returns where its sums and figures are."""
    folder = arm.folder(given.out)
    output = folder / "evaluation.json"
    if output.exists():
        return folder
    label = f"evaluation.{arm.objective}"
    command = [
        *(sys.executable, "-m", "protlm.commands.evaluate", f"checkpoint={folder}"),
        *(f"evaluation=[{arm.objective}]", f"data.dir={given.test}", "data.verify=sizes"),
        *(f"split=[{','.join(splits)}]", f"output={output}"),
        f"{label}.per_sequence={folder / 'sums.tsv'}",
    ]
    if given.families:
        command += [f"{label}.groups={given.families}", f"{label}.column={given.column}"]
    subprocess.run(command, check=True)
    return folder


def read_sums(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Group, targets and nats of each sequence."""
    with path.open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    columns = ("group", "targets", "nats")
    group, targets, nats = (np.array([row[column] for row in rows]) for column in columns)
    return group, targets.astype(float), nats.astype(float)


def difference(pairs: list[tuple[Path, Path]]) -> tuple[float, float, float]:
    """Nats per residue by which the second of each pair is worse, with a 95 % interval.

    Pairs are of seeds; the bootstrap draws seeds, and whole groups of sequences.
    """
    tables = []
    for first, second in pairs:
        group, targets, nats = read_sums(first)
        _, _, other = read_sums(second)
        _, numbers = np.unique(group, return_inverse=True)
        tables.append(np.stack([np.bincount(numbers, other - nats), np.bincount(numbers, targets)]))
    each = np.stack(tables)
    generator = np.random.default_rng(0)
    draws = []
    for _ in range(RESAMPLES):
        seeds = generator.integers(len(each), size=len(each))
        groups = generator.integers(each.shape[2], size=each.shape[2])
        total, targets = each[seeds][:, :, groups].sum(axis=(0, 2))
        draws.append(total / targets)
    total, targets = each.sum(axis=(0, 2))
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(total / targets), float(low), float(high)


def report(given: argparse.Namespace, splits: list[str], done: list[Arm]) -> str:
    """Figures of all runs, and the differences between the twins, in Markdown."""
    lines = ["| objective | mechanism | budget | seed | hours | " + " | ".join(splits) + " |"]
    lines.append("|---" * (5 + len(splits)) + "|")
    for arm in done:
        folder = arm.folder(given.out)
        results = json.loads((folder / "evaluation.json").read_text())["results"]
        figures = [results[split][arm.objective]["model"] for split in splits]
        cells = [f"{f['perplexity']:.2f} / {f['accuracy']:.1%}" for f in figures]
        start = (arm.objective, arm.attention, f"equal {arm.budget}", arm.seed)
        hours = f"{seconds(folder) / 3600:.2f}"
        lines.append(f"| {' | '.join(map(str, (*start, hours, *cells)))} |")
    lines += ["", "Nats per residue by which `softmax` is worse than `performer_relu`:", ""]
    lines += ["| objective | budget | " + " | ".join(splits) + " |"]
    lines.append("|---" * (2 + len(splits)) + "|")
    for objective in OBJECTIVES:
        for budget in ("tokens", "time"):
            cells = []
            for split in splits:
                pairs = [
                    tuple(
                        Arm(objective, name, seed, kind).folder(given.out) / f"sums.{split}.tsv"
                        for name, kind in (("performer_relu", budget), ("softmax", "tokens"))
                    )
                    for seed in given.seeds
                ]
                value, low, high = difference([(a, b) for a, b in pairs])
                cells.append(f"{value:+.4f} ({low:+.4f} to {high:+.4f})")
            lines.append(f"| {objective} | equal {budget} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Trains and evaluates what is missing, and prints the tables."""
    parser = argparse.ArgumentParser(description="Performer and softmax models as twins.")
    parser.add_argument("train", type=Path, help="a data set with clusters, split train")
    parser.add_argument("test", type=Path, help="a data set with the splits valid and test_*")
    parser.add_argument("--steps", type=int, default=5000, help=f"of {TOKENS_PER_STEP} tokens")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--families", type=Path, help="a table with accession and a family")
    parser.add_argument("--column", default="pfam_family")
    parser.add_argument("--out", type=Path, default=Path("runs/twins"))
    parser.add_argument(
        "--time-ratio",
        type=float,
        nargs=len(OBJECTIVES),
        metavar="RATIO",
        help="of a step's time, softmax to performer_relu, masked and causal",
    )
    given = parser.parse_args()
    manifest = json.loads((given.test / "manifest.json").read_text())
    splits = sorted(name for name in manifest["splits"] if name.startswith("test"))
    rates = {name: best_rate(name, given) for name in ("performer_relu", "softmax")}
    rates["performer_softmax"] = rates["softmax"]
    done = list(arms(given.seeds))
    for arm in done:
        train(arm, given, given.steps, rates[arm.attention])
    stable = round((1 - DECAY) * given.steps)
    for arm in [arm for arm in done if arm.attention == "performer_relu"]:
        longer = Arm(arm.objective, arm.attention, arm.seed, "time")
        branch(longer, given)
        steps = max(round(given.steps * time_ratio(arm, given)), stable + 1)
        train(longer, given, steps, rates[arm.attention])
        done.append(longer)
    for arm in done:
        evaluate(arm, given, splits)
    print(report(given, splits, done))


if __name__ == "__main__":
    main()
