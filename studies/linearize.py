"""Makes a softmax model linear in two stages, and measures what each of them recovers.

    python -m studies.linearize MODEL DATA CLUSTERS [--steps 300 300] [--out runs/linearize]
    python -m studies.linearize MODEL DATA CLUSTERS --curve 25 50 100 200 400

The attention of a trained model is replaced, its outputs are learned on their own, and then all
weights are trained to imitate the original (docs/linearize.md). With `--curve`, the model with the
new attention is trained on masked residues only, without the original, as in Figure 5 of arXiv
2009.14794. Masked accuracy is measured after each step, on sequences of clusters that training
never saw. Finished runs are not repeated.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from protlm.checkpoints import format as checkpoints
from protlm.checkpoints.format import CHECKPOINTS, checkpoint_name
from protlm.commands.train import train
from protlm.config import TrainConfig
from protlm.config.composition import compose, to_plain
from protlm.conversion import convert
from protlm.data.shards.data_set import open_split
from protlm.evaluation.accuracy import Accuracy
from protlm.evaluation.base import EvaluationData
from protlm.loading import load_model, read_model
from studies.settings import keep_settings
from studies.tables import rows_of

# Softmax is the control: the original, trained as the others are in stage 2.
MECHANISMS = ("softmax", "performer_softmax", "hedgehog")
RELU = "performer_relu"
# Draws of the masks of a protein, and of the bootstrap.
MASKS, RESAMPLES = 4, 2000
TOKENS_PER_BATCH = 4096


def original(given: argparse.Namespace) -> list[str]:
    """Returns the settings of the architecture of the original."""
    plain = read_model(given.model).description.to_plain()["model"]
    return [f"model.{key}={'null' if v is None else v}" for key, v in plain.items()]


def models(given: argparse.Namespace, mechanism: str) -> Iterator[tuple[str, Path]]:
    """Yields the model after the swap and after each step, which are made if necessary."""
    folder, before = given.out / mechanism, given.model
    folder.mkdir(parents=True, exist_ok=True)
    if mechanism != "softmax":
        before = swapped(given, folder / "swapped", mechanism)
        yield "after the swap", before
    yield from (curve if given.curve else stages)(given, mechanism, before)


def stages(given: argparse.Namespace, mechanism: str, before: Path) -> Iterator[tuple[str, Path]]:
    """Yields the model after each stage."""
    folder = given.out / mechanism
    if mechanism == "hedgehog":
        settings = [f"trainer.max_steps={given.steps[0]}", "objective.stage=attention"]
        settings.append(f"model.init_from={before}")
        before = run(given, folder / "attention", mechanism, settings)
        yield "after stage 1", before
    settings = [f"trainer.max_steps={given.steps[1]}", "objective.stage=logits"]
    settings += [f"optimizer.learning_rate={given.rate}", f"model.init_from={before}"]
    if given.lora is None:
        yield "after stage 2", run(given, folder / "logits", mechanism, settings)
    else:
        settings += [f"objective.lora_rank={given.lora}"]
        name = f"after stage 2, adapters of rank {given.lora}"
        yield name, run(given, folder / f"lora_{given.lora}", mechanism, settings)


def curve(given: argparse.Namespace, mechanism: str, before: Path) -> Iterator[tuple[str, Path]]:
    """Yields the model after numbers of steps on masked residues."""
    path = given.out / mechanism / "masked"
    settings = ["objective=masked", "schedule=constant", f"model.init_from={before}"]
    settings += [f"optimizer.learning_rate={given.rate}", "trainer.keep_checkpoints=1000"]
    for number in sorted(given.curve):
        checkpoint = path / CHECKPOINTS / checkpoint_name(number)
        if not checkpoint.exists():
            run(given, path, mechanism, [*settings, f"trainer.max_steps={number}"], teacher=False)
        yield f"after {number} steps", checkpoint


def swapped(given: argparse.Namespace, folder: Path, mechanism: str) -> Path:
    """Converts the original; returns the folder of the result."""
    if not folder.is_dir():
        chosen = to_plain(compose(TrainConfig, [f"attention={mechanism}"]))["attention"]
        checkpoints.export(convert(read_model(given.model), chosen, seed=0).checkpoint, folder)
    return folder


def run(
    given: argparse.Namespace,
    folder: Path,
    mechanism: str,
    settings: list[str],
    *,
    teacher: bool = True,
) -> Path:
    """Trains a run, or finishes it; returns its folder."""
    fixed = ["experiment=linearize", f"attention={mechanism}", *original(given)]
    fixed += [f"data.dir={given.sampled or given.data}", f"run_dir={folder}"]
    fixed += [f"objective.teacher={given.model}"] if teacher else []
    fixed += ["data.max_length=128", f"data.tokens_per_batch={given.tokens}"]
    fixed += ["schedule.warmup_steps=10", "trainer.log_every=10", "trainer.valid_every=1000000"]
    train(compose(TrainConfig, [*fixed, *settings]))
    return folder


def correct(given: argparse.Namespace, model: Path, sums: Path) -> tuple[np.ndarray, np.ndarray]:
    """Returns the correct predictions and the targets of each cluster, over all draws of masks."""
    data = EvaluationData(
        open_split(given.data, "test"), open_split(given.data, "train"), TOKENS_PER_BATCH, "test"
    )
    sums.parent.mkdir(parents=True, exist_ok=True)
    totals: dict[str, np.ndarray] = {}
    for seed in range(MASKS):
        path = sums.with_suffix(f".{seed}.tsv")
        written = path.with_suffix(".test.tsv")
        if not written.exists():
            evaluation = Accuracy(
                objective="masked",
                seed=seed,
                groups=str(given.clusters),
                column="cluster",
                per_sequence=str(path),
            )
            evaluation.run(load_model(model), data)
        for row in rows_of(written):
            values = np.array([float(row["correct"]), float(row["targets"])])
            totals[row["group"]] = totals.get(row["group"], 0) + values
    found, targets = np.stack([totals[group] for group in sorted(totals)]).T
    return found, targets


def figures(found: np.ndarray, before: np.ndarray, targets: np.ndarray) -> str:
    """Returns accuracy and the fraction of the original's, each with a 95 % interval.

    The bootstrap draws clusters, the same ones for both models.
    """
    generator = np.random.default_rng(0)
    draws = generator.integers(len(found), size=(RESAMPLES, len(found)))
    cells = []
    for top, bottom in ((found, targets), (found, before)):
        ratios = top[draws].sum(1) / bottom[draws].sum(1)
        low, high = np.quantile(ratios, [0.025, 0.975])
        cells.append(f"{top.sum() / bottom.sum():.1%} ({low:.1%} to {high:.1%})")
    return " | ".join(cells)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains what is missing, and prints a table."""
    parser = argparse.ArgumentParser(description="A softmax model made linear, in two stages.")
    parser.add_argument("model", type=Path, help="a model with attention=softmax")
    parser.add_argument("data", type=Path, help="a data set with the splits train, valid, test")
    parser.add_argument("clusters", type=Path, help="a table with the columns accession, cluster")
    parser.add_argument("--mechanisms", nargs="+", default=MECHANISMS, choices=[*MECHANISMS, RELU])
    parser.add_argument(
        "--steps", type=int, nargs=2, default=[300, 300], help="steps of each stage"
    )
    parser.add_argument("--curve", type=int, nargs="+", help="steps without the original")
    parser.add_argument(
        "--rate", type=float, default=1e-4, help="learning rate of stage 2, or of --curve"
    )
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a step")
    parser.add_argument("--lora", type=int, help="rank of the adapters of stage 2")
    parser.add_argument("--sampled", type=Path, help="a data set to train on instead")
    parser.add_argument("--out", type=Path, default=Path("runs/linearize"))
    given = parser.parse_args(arguments)
    # The runs themselves refuse another rate or number of tokens.
    keep_settings(given, "model", "data", "clusters", "sampled", "steps")
    before, targets = correct(given, given.model, given.out / "original")
    print("| mechanism | model | masked accuracy | of the original's |\n|---|---|---|---|")
    print(f"| softmax | original | {figures(before, before, targets)} |", flush=True)
    for mechanism in given.mechanisms:
        for step, model in models(given, mechanism):
            name = f"{mechanism} {step}".replace(" ", "_")
            found, _ = correct(given, model, given.out / name)
            print(f"| {mechanism} | {step} | {figures(found, before, targets)} |", flush=True)


if __name__ == "__main__":
    main()
