"""Twins: what linear attention costs or gains on proteins, everything else being equal.

    python -m studies.twins TRAIN TEST --groups TABLE --sample DATA [--mechanisms NAME ...]
        [--steps 5000] [--seeds 0 1 2] [--jobs 2] [--longer NAME ...] [--out runs/twins]

For each objective and seed, models that differ in their attention see the same batches and masks,
start from the same weights where shapes agree, and have the same extras. All keep the peak of the
learning rate, and decay over the last 40 % of their steps. Those of `--longer` are trained once
more with the first seed, from the same stable phase, for the wall time that the reference took,
where their step is faster. Interrupted runs continue, and finished ones are not repeated: of these,
the log and the evaluations are enough, so that a study may continue elsewhere. First, each
mechanism runs short, masked, at several learning rates, and keeps the one with the lowest
validation loss, for its causal models too. With `--rate`, all take this rate.

Wall times are sums over the steps in the log, so nothing else may run at the same time; otherwise
give the seconds of a step, measured on the idle machine (`--step-seconds`). SIGTERM ends the runs
with a checkpoint each, and the study.

Figures are of TEST, whose TABLE has the columns accession, cluster30 and pfam_family, and of the
four test splits of the shipped sample, prepared with its split table. Rows are of at most 512
tokens, as in training. With another `--length` the models are trained and tested on rows of this
many tokens of joined sequences; a step has a row at least. The mechanisms `softmax_of_one_layer`
and `softmax_of_one_narrow_layer` are smaller models: exact attention as large as the memory of a
Performer's step would hold if maps were stored, or as fast as a Performer, in rows of 8,192.
"""

import argparse
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from protlm.plots import save_figure
from protlm.system.errors import one_of
from studies.runs import end_by_signal, log, protlm, side_by_side, validations
from studies.settings import keep_settings
from studies.twin_evaluations import EVALUATED, LENGTH, columns, evaluate, is_evaluated
from studies.twin_tables import LONGER, curves, differences_table, figures_table

TOKENS_PER_STEP = 4096
DECAY = 0.4
WARMUP_STEPS = 500
COMMON = (
    "model=medium",
    "model.model_dim=128",
    "model.feedforward_dim=344",
    "optimizer=muon",
    "schedule=wsd_linear",
    "optimizer.beta2_half_life=1e7",
    "data.sampling=cluster",
    "data.verify=sizes",
    "trainer.gradient_clip=1.0",
    "trainer.log_every=50",
    "trainer.keep_checkpoints=100",
)
RATES = (3e-3, 6e-3, 1.2e-2)
RATE_TOKENS = 200 * TOKENS_PER_STEP
OBJECTIVES = {"masked": "mask_only", "causal": "causal"}
SOFTMAX = "softmax"
# The settings of each mechanism.
MECHANISMS = {
    SOFTMAX: ("attention=softmax",),
    "performer_relu": ("attention=performer_relu",),
    "performer_relu_learned": ("attention=performer_relu", "attention.decay=learned"),
    "performer_relu_selective": ("attention=performer_relu", "attention.decay=selective"),
    "performer_softmax": ("attention=performer_softmax",),
    "hybrid": ("attention=hybrid",),
    "hybrid_learned": ("attention=hybrid", "+attention.options.decay=learned"),
    "hybrid_selective": ("attention=hybrid", "+attention.options.decay=selective"),
    "alternating": ("attention=alternating",),
    "softmax_of_one_layer": ("attention=softmax", "model.num_layers=1"),
    "softmax_of_one_narrow_layer": (
        *("attention=softmax", "model.num_layers=1", "model.num_heads=2"),
        *("model.model_dim=80", "model.feedforward_dim=216"),
    ),
}
DEFAULT = (SOFTMAX, "performer_relu", "performer_softmax", "hybrid")


@dataclass(frozen=True)
class Arm:
    """A run: objective, mechanism, seed, and whether it has equal tokens or equal time."""

    objective: str
    attention: str
    seed: int
    budget: str = "tokens"

    def folder(self, out: Path) -> Path:
        """The folder of the run."""
        return out / f"{self.objective}-{self.attention}-{self.seed}-{self.budget}"


def arms(given: argparse.Namespace) -> Iterator[Arm]:
    """The runs with equal tokens, seed by seed."""
    for seed in given.seeds:
        for objective in given.objectives:
            for mechanism in given.mechanisms:
                yield Arm(objective, mechanism, seed)


def train(arm: Arm, given: argparse.Namespace, steps: int, rate: float) -> None:
    """Makes or continues a run; ends the study if it fails."""
    planned = min(steps, given.steps)
    stable = round((1 - DECAY) * planned)
    protlm(
        *("train", f"objective={OBJECTIVES[arm.objective]}"),
        *COMMON,
        *MECHANISMS[arm.attention],
        f"optimizer.learning_rate={rate}",
        f"schedule.warmup_steps={min(WARMUP_STEPS, planned // 10)}",
        *row_settings(given.length),
        *(f"data.dir={given.train}", f"data.valid_dir={given.test}", f"seed={arm.seed}"),
        *(f"trainer.max_steps={steps}", f"trainer.valid_every={max(planned // 10, 1)}"),
        *(f"trainer.checkpoint_every={stable}", "trainer.checkpoint_minutes=10"),
        "trainer.valid_batches=25",
        f"run_dir={arm.folder(given.out)}",
    )


def row_settings(length: int) -> tuple[str, ...]:
    """Returns the settings of rows of `length` tokens."""
    return (
        *(f"model.max_length={length}", f"data.max_length={length}"),
        f"data.tokens_per_batch={tokens_per_step(length)}",
        "data.crop=random" if length == LENGTH else "data.mode=concatenated",
    )


def tokens_per_step(length: int) -> int:
    """Returns the tokens of a step on rows of `length` tokens."""
    return max(TOKENS_PER_STEP, length)


def best_rates(given: argparse.Namespace) -> dict[str, float]:
    """Returns the given learning rate, or those with the lowest loss after short masked runs."""
    if given.rate:
        return {name: float(given.rate) for name in given.mechanisms}
    steps = min(RATE_TOKENS // tokens_per_step(given.length), given.steps)
    runs = {
        (name, rate): Arm("masked", name, 0, f"rate-{rate}")
        for name in given.mechanisms
        for rate in RATES
    }
    missing = [key for key, arm in runs.items() if last_step(arm, given) < steps]
    side_by_side(lambda key: train(runs[key], given, steps, key[1]), missing, given.jobs)
    best: dict[str, float] = {}
    for name in given.mechanisms:
        losses = {rate: validations(runs[name, rate].folder(given.out))[steps] for rate in RATES}
        print(f"{name}: validation loss by learning rate {losses}", flush=True)
        best[name] = min(losses, key=lambda rate: np.nan_to_num(losses[rate], nan=np.inf))
    return best


def step_seconds(arm: Arm, given: argparse.Namespace) -> float:
    """Returns the time of a step, as given or from the log, without validations and starts."""
    if given.step_seconds:
        return given.step_seconds[f"{arm.objective}:{arm.attention}"]
    rows = log(arm.folder(given.out))
    return sum(row.get("seconds", 0) for row in rows) / last_step(arm, given)


def branch(arm: Arm, given: argparse.Namespace) -> None:
    """Copies the stable phase of a run, which continues from there, without its evaluations."""
    source = Arm(arm.objective, arm.attention, arm.seed).folder(given.out)
    target = arm.folder(given.out)
    if target.exists():
        return
    stable = round((1 - DECAY) * given.steps)
    unfinished = target.with_name(f"{target.name}.copy")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(source, unfinished, ignore=shutil.ignore_patterns(EVALUATED))
    (unfinished / "checkpoints" / "latest").write_text(f"step-{stable:08d}.ckpt\n")
    unfinished.rename(target)


def report(given: argparse.Namespace, done: list[Arm]) -> str:
    """Figures of all runs, and the differences between the twins, in Markdown."""
    shown = columns(given)
    runs: dict[tuple[str, ...], Path] = {}
    hours = {}
    for arm in done:
        cells = (arm.objective, arm.attention, f"equal {arm.budget}", str(arm.seed))
        runs[cells] = arm.folder(given.out)
        hours[cells] = last_step(arm, given) * step_seconds(arm, given) / 3600
    title = f"`{given.reference}` less `{{}}`, with 95 % intervals (nats above 0: it is worse):"
    tables = [figures_table(runs, hours, shown)]
    for mechanism in sorted(set(given.mechanisms) - {given.reference}):
        if pairs := pairs_with_reference(mechanism, given, done):
            tables += [title.format(mechanism), differences_table(pairs, shown)]
    return "\n\n".join(tables)


def pairs_with_reference(
    mechanism: str, given: argparse.Namespace, done: list[Arm]
) -> dict[tuple[str, ...], list[tuple[Path, Path]]]:
    """Returns the runs of a mechanism, each with its reference, by objective and budget."""
    pairs: dict[tuple[str, ...], list[tuple[Path, Path]]] = {}
    for objective in given.objectives:
        for arm in done:
            twin = Arm(objective, given.reference, arm.seed)
            if (arm.objective, arm.attention) == (objective, mechanism) and twin in done:
                both = (arm.folder(given.out), twin.folder(given.out))
                pairs.setdefault((objective, f"equal {arm.budget}"), []).append(both)
    return pairs


def last_step(arm: Arm, given: argparse.Namespace) -> int:
    """Returns the last step in the log of a run; 0 without a log."""
    rows = log(arm.folder(given.out))
    return int(rows[-1]["step"]) if rows else 0


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
            tokens_per_step=tokens_per_step(given.length),
            color=lambda label: color(label.removesuffix(LONGER)),
        )
        save_figure(figure, given.out / f"{objective}.png", overwrite=True)


def color(mechanism: str) -> tuple[float, ...]:
    """Returns the color of a mechanism: those of tab10, and then their light ones."""
    from matplotlib import colormaps

    lightness, hue = divmod(list(MECHANISMS).index(mechanism), 10)
    return colormaps["tab20"](2 * hue + lightness)


def longer_runs(given: argparse.Namespace, rates: dict[str, float]) -> Iterator[Arm]:
    """Trains some as long as the reference took, where that is longer than they took."""
    for objective in given.objectives:
        for name in given.longer:
            arm = Arm(objective, name, given.seeds[0])
            twin = Arm(objective, given.reference, arm.seed)
            own, others = step_seconds(arm, given), step_seconds(twin, given)
            steps = round(given.steps * others / own)
            if steps <= given.steps:
                print(
                    f"{objective}: a step of {given.reference} takes {others:.3g} s, of {name} "
                    f"{own:.3g} s; it is not trained longer"
                )
                continue
            longer = Arm(arm.objective, arm.attention, arm.seed, "time")
            if not is_evaluated(longer.folder(given.out)):
                branch(longer, given)
                train(longer, given, steps, rates[name])
            yield longer


def arguments(command_line: Sequence[str] | None) -> argparse.Namespace:
    """Returns the arguments of the command."""
    parser = argparse.ArgumentParser(description="Performer and softmax models as twins.")
    parser.add_argument("train", type=Path, help="a data set with clusters, split train")
    parser.add_argument("test", type=Path, help="a data set with the splits valid and test_*")
    parser.add_argument("--groups", type=Path, required=True, help="clusters and families of TEST")
    parser.add_argument("--sample", type=Path, required=True, help="the sample, prepared")
    parser.add_argument(
        "--steps", type=int, default=5000, help=f"steps of {TOKENS_PER_STEP} tokens or one row"
    )
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a row")
    parser.add_argument(
        "--rate", type=float, help="learning rate, instead of the best of short runs"
    )
    names = {"nargs": "+", "choices": MECHANISMS, "metavar": "NAME"}
    known = f"of {', '.join(MECHANISMS)}"
    parser.add_argument("--mechanisms", **names, default=DEFAULT, help=known)
    against = "what the others are compared with"
    parser.add_argument("--reference", choices=MECHANISMS, default=SOFTMAX, help=against)
    parser.add_argument("--longer", **names, default=[], help="trained for equal time, too")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--out", type=Path, default=Path("runs/twins"))
    parser.add_argument(
        "--step-seconds",
        type=step_time,
        nargs="+",
        default=[],
        metavar="OBJECTIVE:MECHANISM=SECONDS",
        help="seconds of a step on the idle machine, for all runs; by default those of the logs",
    )
    parsed = parser.parse_args(command_line)
    parsed.step_seconds = dict(parsed.step_seconds)
    if missing := {parsed.reference, *parsed.longer} - set(parsed.mechanisms):
        parser.error(
            f"--mechanisms has no {', '.join(sorted(missing))}, which --reference or --longer names"
        )
    wanted = {f"{arm.objective}:{arm.attention}" for arm in arms(parsed)}
    if parsed.step_seconds and (missing := sorted(wanted - set(parsed.step_seconds))):
        parser.error(f"--step-seconds has no {', '.join(missing)}; give all or none")
    return parsed


def step_time(text: str) -> tuple[str, float]:
    """Reads OBJECTIVE:MECHANISM=SECONDS."""
    name, _, value = text.partition("=")
    names = [f"{objective}:{mechanism}" for objective in OBJECTIVES for mechanism in MECHANISMS]
    try:
        time = float(value)
    except ValueError:
        time = math.nan
    if name not in names or not 0 < time < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a finite time above 0 of one of: {one_of(names)}; type for instance "
            f"{names[0]}=0.4"
        )
    return name, time


def main(command_line: Sequence[str] | None = None) -> None:
    """Trains and evaluates what is missing, prints the tables and draws the curves."""
    given = arguments(command_line)
    end_by_signal()
    keep_settings(given, "train", "test", "groups", "sample", "steps", "length", "rate")
    rates, done = best_rates(given), list(arms(given))

    def work(arm: Arm) -> None:
        if not is_evaluated(arm.folder(given.out)):
            train(arm, given, given.steps, rates[arm.attention])
        evaluate(arm.folder(given.out), arm.objective, given)

    side_by_side(work, done, given.jobs)
    for arm in longer_runs(given, rates):
        evaluate(arm.folder(given.out), arm.objective, given)
        done.append(arm)
    print(report(given, done))
    draw(given, done)


if __name__ == "__main__":
    main()
