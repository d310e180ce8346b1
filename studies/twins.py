"""Twins: what linear attention costs or gains on proteins, everything else being equal.

    python -m studies.twins TRAIN TEST --sample DATA [--steps 5000] [--seeds 0 1] [--out runs/twins]

For each objective and seed a model with `performer_relu` and one with `softmax` see the same
batches and masks, start from the same weights and have the same extras. Both keep the peak of the
learning rate, and decay over the last 40 % of their steps: once after equal tokens, and the
Performer once more, from the same stable phase, after the wall time that the softmax model took.
Finished runs are not repeated, and interrupted ones continue. Before them each mechanism runs short
at several learning rates, and keeps the one with the lowest validation loss.

Wall times are sums over the steps in the log, so nothing else may run beside; where something does,
give the seconds of a step, measured on the idle machine (`--step-seconds`).

Figures are of TEST and of the four test splits of the shipped sample, prepared with its split
table. Rows are of at most 512 tokens, as in training. With another `--length` the models train on
rows of this many tokens, in which sequences are joined, and are tested on rows of one protein.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from protlm.paths import sample_dir
from protlm.plots import save_figure
from protlm.plots.panels import BLUE, GREEN, ORANGE
from studies.twin_tables import (
    LONGER,
    Column,
    curves,
    differences_table,
    figures_table,
    log,
    seconds,
)

TOKENS_PER_STEP = 4096
LENGTH = 512
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
    f"data.tokens_per_batch={TOKENS_PER_STEP}",
    "data.verify=sizes",
    "trainer.gradient_clip=1.0",
    "trainer.log_every=50",
    "trainer.keep_checkpoints=100",
)
RATES = (1.5e-3, 3e-3, 6e-3)
RATE_STEPS = 600
OBJECTIVES = {"masked": "mask_only", "causal": "causal"}
COLORS = {"performer_relu": BLUE, "softmax": ORANGE, "performer_softmax": GREEN}
SAMPLE, FAMILIES = ("test_iid", "test_remote_homolog", "test_ood_cluster"), "test_ood_family"


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
        *row_settings(given.length),
        *(f"data.dir={given.train}", f"data.valid_dir={given.test}", f"seed={arm.seed}"),
        *(f"trainer.max_steps={steps}", f"trainer.valid_every={max(planned // 10, 1)}"),
        *(f"trainer.checkpoint_every={stable}", "trainer.checkpoint_minutes=10"),
        "trainer.valid_batches=100",
        f"run_dir={arm.folder(given.out)}",
    ]
    subprocess.run(command, check=True)


def row_settings(length: int) -> tuple[str, ...]:
    """Returns the settings of rows of `length` tokens."""
    mode = "sequences" if length == LENGTH else "concatenated"
    return f"model.max_length={length}", f"data.max_length={length}", f"data.mode={mode}"


def best_rate(attention: str, given: argparse.Namespace) -> float:
    """Returns the learning rate with the lowest validation loss after short masked runs."""
    steps = min(RATE_STEPS, given.steps)
    losses = {}
    for rate in RATES:
        arm = Arm("masked", attention, given.seeds[0], f"rate-{rate}")
        train(arm, given, steps, rate)
        rows = [row for row in log(arm.folder(given.out)) if row["valid_loss"]]
        losses[rate] = float(rows[-1]["valid_loss"])
    print(f"{attention}: validation loss by learning rate {losses}", flush=True)
    return min(losses, key=losses.__getitem__)


def step_seconds(arm: Arm, given: argparse.Namespace) -> float:
    """Returns the time of a step, as given or from the log."""
    if given.step_seconds:
        return given.step_seconds[f"{arm.objective}:{arm.attention}"]
    return seconds(arm.folder(given.out)) / given.steps


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


def evaluate(arm: Arm, given: argparse.Namespace) -> None:
    """Evaluates a run on all splits, unless it is done; the sums are in its folder."""
    groups = f"groups={sample_dir() / 'uniprot_sample.splits.tsv.gz'}"
    for name, data, splits, settings in (
        ("test", given.test, test_splits(given), ()),
        ("sample", given.sample, SAMPLE, (groups, "column=cluster30")),
        ("families", given.sample, [FAMILIES], (groups, "column=pfam_family")),
    ):
        output = arm.folder(given.out) / f"{name}.json"
        if output.exists():
            continue
        sums = output.with_suffix(".tsv")
        options = (f"max_length={given.length}", f"per_sequence={sums}", *settings)
        command = [
            *(sys.executable, "-m", "protlm.commands.evaluate"),
            *(f"checkpoint={arm.folder(given.out)}", f"evaluation=[{arm.objective}]"),
            *(f"data.dir={data}", "data.verify=sizes", f"split=[{','.join(splits)}]"),
            *(f"evaluation.{arm.objective}.{option}" for option in options),
            f"output={output}",
        ]
        for left in sums.parent.glob(f"{name}.test_*.tsv"):
            left.unlink()
        subprocess.run(command, check=True)


def test_splits(given: argparse.Namespace) -> list[str]:
    """Returns the names of the test splits of TEST."""
    manifest = json.loads((given.test / "manifest.json").read_text())
    return sorted(name for name in manifest["splits"] if name.startswith("test"))


def columns(given: argparse.Namespace) -> list[Column]:
    """The columns of the tables."""
    name, table = given.test.name, f"families.{FAMILIES}.tsv"
    return [
        *(Column(f"{name}, {split}", f"test.{split}.tsv") for split in test_splits(given)),
        *(Column(f"sample, {split}", f"sample.{split}.tsv") for split in SAMPLE),
        Column(f"sample, {FAMILIES}: kinases", table, kinases=True),
        Column("the others", table, kinases=False),
        Column("mean over families", table, by_family=True),
    ]


def report(given: argparse.Namespace, done: list[Arm]) -> str:
    """Figures of all runs, and the differences between the twins, in Markdown."""
    shown = columns(given)
    runs: dict[tuple[str, ...], Path] = {}
    hours = {}
    for arm in done:
        cells = (arm.objective, arm.attention, f"equal {arm.budget}", str(arm.seed))
        runs[cells] = arm.folder(given.out)
        hours[cells] = last_step(arm, given) * step_seconds(arm, given) / 3600
    pairs = {}
    for objective in OBJECTIVES:
        for budget in ("tokens", "time"):
            pairs[objective, f"equal {budget}"] = [
                (relu.folder(given.out), softmax.folder(given.out))
                for relu in done
                if relu == Arm(objective, "performer_relu", relu.seed, budget)
                and (softmax := Arm(objective, "softmax", relu.seed)) in done
            ]
    found = {cells: some for cells, some in pairs.items() if some}
    title = "`softmax` less `performer_relu`, with 95 % intervals (nats above 0: softmax is worse):"
    tables = [figures_table(runs, hours, shown), [title], differences_table(found, shown)]
    return "\n\n".join("\n".join(lines) for lines in tables)


def last_step(arm: Arm, given: argparse.Namespace) -> int:
    """Returns the number of steps of a complete run."""
    return int(log(arm.folder(given.out))[-1]["step"])


def draw(given: argparse.Namespace, done: list[Arm]) -> None:
    """Draws the curves of the first seed for each objective."""
    for objective in {arm.objective for arm in done}:
        runs = {
            arm.attention if arm.budget == "tokens" else arm.attention + LONGER: (
                arm.folder(given.out),
                step_seconds(arm, given),
            )
            for arm in done
            if arm.objective == objective and arm.seed == given.seeds[0]
        }
        figure = curves(
            runs,
            tokens_per_step=TOKENS_PER_STEP,
            color=lambda label: COLORS[label.removesuffix(LONGER)],
        )
        save_figure(figure, given.out / f"{objective}.png", overwrite=True)


def longer_runs(done: list[Arm], given: argparse.Namespace, rate: float) -> Iterator[Arm]:
    """Trains the Performers as long as their twins took, from their stable phases."""
    stable = round((1 - DECAY) * given.steps)
    for arm in [arm for arm in done if arm.attention == "performer_relu"]:
        longer = Arm(arm.objective, arm.attention, arm.seed, "time")
        branch(longer, given)
        twin = Arm(arm.objective, "softmax", arm.seed)
        ratio = step_seconds(twin, given) / step_seconds(arm, given)
        train(longer, given, max(round(given.steps * ratio), stable + 1), rate)
        yield longer


def arguments() -> argparse.Namespace:
    """Returns the arguments of the command."""
    parser = argparse.ArgumentParser(description="Performer and softmax models as twins.")
    parser.add_argument("train", type=Path, help="a data set with clusters, split train")
    parser.add_argument("test", type=Path, help="a data set with the splits valid and test_*")
    parser.add_argument("--sample", type=Path, required=True, help="the sample, prepared")
    parser.add_argument("--steps", type=int, default=5000, help=f"of {TOKENS_PER_STEP} tokens")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a row")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--out", type=Path, default=Path("runs/twins"))
    parser.add_argument(
        "--step-seconds",
        type=step_time,
        nargs="+",
        default=[],
        metavar="OBJECTIVE:MECHANISM=SECONDS",
        help="of a step on the idle machine, of all runs; by default those of the logs",
    )
    given = parser.parse_args()
    given.step_seconds = dict(given.step_seconds)
    return given


def step_time(text: str) -> tuple[str, float]:
    """Reads OBJECTIVE:MECHANISM=SECONDS."""
    name, _, value = text.partition("=")
    return name, float(value)


def main() -> None:
    """Trains and evaluates what is missing, prints the tables and draws the curves."""
    given = arguments()
    rates = {name: best_rate(name, given) for name in ("performer_relu", "softmax")}
    rates["performer_softmax"] = rates["softmax"]
    done = [arm for arm in arms(given.seeds) if arm.objective in given.objectives]
    for arm in done:
        train(arm, given, given.steps, rates[arm.attention])
    done += longer_runs(done, given, rates["performer_relu"])
    for arm in done:
        evaluate(arm, given)
    print(report(given, done))
    draw(given, done)


if __name__ == "__main__":
    main()
