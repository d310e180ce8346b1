"""Which options of the training recipe pay: one short run for each, with equal tokens.

    python -m studies.recipe DATA VALID [--steps 1000] [--jobs 2] [--out runs/recipe]

Every run starts from the same seed, sees the same batches and masks, and differs from the base in
what its name says. All are evaluated alike, on masked residues of the split valid of VALID.
Finished runs are not repeated, and interrupted runs continue. Short runs can invert ranks: a
difference below the spread of the seeds means nothing.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from studies.runs import in_order, log, name_of, side_by_side
from studies.settings import keep_settings
from studies.tables import markdown
from studies.twin_tables import Column, difference

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
    "data.sampling=cluster",
    "data.crop=random",
    "data.max_length=512",
    "data.tokens_per_batch=4096",
    "data.verify=sizes",
    "trainer.gradient_clip=1.0",
    "trainer.log_every=50",
)
SMALL = ("model.model_dim=128", "model.feedforward_dim=344")
EXTRAS = ("model.convolution=5", "model.value_embedding=true", "model.unet_skips=true")
FULL = "all three extras, Muon"
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
    "base, seed 1": ("seed=1",),
    FULL: (*EXTRAS, "optimizer=muon"),
    f"{FULL}, seed 1": (*EXTRAS, "optimizer=muon", "seed=1"),
    f"{FULL}, rate 1.5e-3": (*EXTRAS, "optimizer=muon", "optimizer.learning_rate=1.5e-3"),
    f"{FULL}, rate 6e-3": (*EXTRAS, "optimizer=muon", "optimizer.learning_rate=6e-3"),
}
ALL_RATES = (FULL, f"{FULL}, rate 1.5e-3", f"{FULL}, rate 6e-3")
SMALL_RUNS = {
    "performer_relu": tuple(OPTIONS),
    "softmax": ("base", "convolution", "Muon", *ALL_RATES),
    "hybrid": ("base", *ALL_RATES),
}
VALID = Column("valid", "evaluated.valid.tsv")


@dataclass(frozen=True)
class Arm:
    """A run: the mechanism, the size, how it differs from the base, and its folder."""

    attention: str
    size: str
    option: str
    folder: Path

    @property
    def log(self) -> Path:
        """The file with the output of the run's commands."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def report(self) -> Path:
        """The file with the run's evaluation."""
        return self.folder / "evaluated.json"

    def overrides(self, data: Path, steps: int) -> list[str]:
        """The settings for `protlm train`; choices of groups come before their values."""
        size = {"small": SMALL, "medium": ()}[self.size]
        given = [*BASE, *size, *OPTIONS[self.option]]
        ends = f"trainer.max_steps={steps} trainer.valid_every={steps} trainer.checkpoint_every=200"
        run = [f"attention={self.attention}", f"data.dir={data}", f"run_dir={self.folder}"]
        return in_order([*given, *run, *ends.split()])

    def evaluation(self, valid: Path) -> list[str]:
        """The settings for `protlm evaluate`: the same rule of masking for all objectives."""
        sums = self.report.with_suffix(".tsv")
        return [
            *(f"checkpoint={self.folder}", f"data.dir={valid}", "split=valid"),
            *("data.verify=sizes", "evaluation=[masked]", "evaluation.masked.max_length=512"),
            *(f"evaluation.masked.per_sequence={sums}", f"output={self.report}"),
        ]


def arms(out: Path) -> Iterator[Arm]:
    """All runs."""
    small = ((name, "small", option) for name, options in SMALL_RUNS.items() for option in options)
    for arm in (*small, *((name, "medium", FULL) for name in SMALL_RUNS)):
        yield Arm(*arm, out / name_of("-".join(arm)))


def make(arm: Arm, given: argparse.Namespace) -> None:
    """Makes or continues a run and evaluates it, in separate processes."""
    if arm.report.exists():
        return
    training = [*arm.overrides(given.data, given.steps), f"data.valid_dir={given.valid}"]
    commands = (
        [sys.executable, "-m", "protlm.train", *training],
        [sys.executable, "-m", "protlm", "evaluate", *arm.evaluation(given.valid)],
    )
    (arm.folder / VALID.table).unlink(missing_ok=True)
    with arm.log.open("w", encoding="utf-8") as log:
        for command in commands:
            done = subprocess.run(command, stdout=log, stderr=log, check=False)
            if done.returncode:
                return


def table(done: list[Arm]) -> str:
    """The evaluations of all runs as a table in Markdown.

    Differences are from the base of the same mechanism and size, or, where there is none, left out;
    their intervals come from a bootstrap over proteins.
    """
    figures = ("perplexity", "accuracy", "nats above the base", "residues/s")
    rows: list[Sequence[str]] = [("mechanism", "size", "option", *figures)]
    bases = {(arm.attention, arm.size): arm for arm in done if arm.option == "base"}
    for arm in done:
        base = bases.get((arm.attention, arm.size))
        cells = ["failed", "", "", ""]
        if arm.report.exists():
            found = json.loads(arm.report.read_text())["results"]["valid"]["masked"]["model"]
            above = _above(base, arm) if base and base is not arm and base.report.exists() else ""
            rate = f"{_rate(arm.folder):,.0f}"
            cells = [f"{found['perplexity']:.2f}", f"{found['accuracy']:.2%}", above, rate]
        rows.append((arm.attention, arm.size, arm.option, *cells))
    return markdown(rows)


def _above(base: Arm, arm: Arm) -> str:
    value, low, high = (x[0] for x in difference([(base.folder, arm.folder)], VALID))
    return f"{value:+.4f} ({low:+.4f} to {high:+.4f})"


def _rate(folder: Path) -> float:
    return median(row["residues_per_second"] for row in log(folder) if "train_loss" in row)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what is missing, and prints the table; ends with 1 if a run failed."""
    parser = argparse.ArgumentParser(description="Which options of the training recipe pay.")
    parser.add_argument("data", type=Path, help="a data set with clusters, split train")
    parser.add_argument("valid", type=Path, help="a data set with the split valid")
    parser.add_argument("--steps", type=int, default=1000, help="steps of 4,096 tokens")
    parser.add_argument(
        "--jobs", type=int, default=2, help="runs at a time, which share the CPUs equally"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/recipe"))
    given = parser.parse_args(arguments)
    # The number of jobs decides the number of threads, and with it the residues/s.
    keep_settings(given, "data", "valid", "steps", "jobs")
    wanted = list(arms(given.out))
    os.environ["OMP_NUM_THREADS"] = str(max((os.cpu_count() or 1) // given.jobs, 1))
    side_by_side(lambda arm: make(arm, given), wanted, given.jobs)
    print(table(wanted))
    if failed := [arm for arm in wanted if not arm.report.exists()]:
        sys.exit(f"{len(failed)} runs failed, the first: see {failed[0].log}")


if __name__ == "__main__":
    main()
