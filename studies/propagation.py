"""Replaces the attention of trained softmax models by FAVOR+.

    python -m studies.propagation [--model RUN ... --data DIR] [--quick] [--out DIR]

Every weight stays as it was (arXiv 2009.14794, section 4.2 and Fig. 14). Without `--model` two
models are trained on the shipped sample first: one with free queries and keys, one with queries
and keys of a bounded norm. Errors are medians over three draws of the projections.
"""

import argparse
import csv
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import MARKDOWN
from rich.console import Console
from rich.progress import track
from rich.table import Table

from protlm.plots import save_figure
from protlm.system.errors import UserError, exit_with_message
from protlm.system.paths import complete_file, sample_dir
from studies.replacement import (
    ACCURACY,
    CUMULATIVE,
    LARGEST_NORM,
    NORM,
    OPTIMAL,
    PERPLEXITY,
    POSITIVE,
    SINGLE,
    SOFTMAX,
    UNIFORM,
    Row,
    Subject,
    medians,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The smallest of the sample's test splits.
SPLIT = "test_remote_homolog"


@dataclass(frozen=True)
class Study:
    """Numbers of features, draws of the projection, proteins, and settings of a run."""

    features: tuple[int, ...]
    draws: int
    proteins: int
    training: tuple[str, ...]


FULL = Study(
    features=(64, 128, 256, 512, 1024, 2048, 4096),
    draws=3,
    proteins=8,
    training=("experiment=demo",),
)
QUICK = Study(
    features=(64, 256),
    draws=1,
    proteins=4,
    training=(
        *("experiment=demo", "model=tiny", "data.max_length=128"),
        *("schedule.warmup_steps=2", "trainer.max_steps=20"),
    ),
)


def trained(folder: Path, training: Sequence[str]) -> list[Path]:
    """Trains the two softmax models of the study in a folder, unless they are there."""
    sample, data = sample_dir(), folder / "data"
    if not data.exists():
        _protlm(
            *("prepare", str(sample / "uniprot_sample.fasta.gz"), "--out", str(data)),
            *("--split-table", str(sample / "uniprot_sample.splits.tsv.gz")),
        )
    bounded = ("model.qk_norm=true", "attention.bounded_qk_norm=true")
    runs = {"free": ("model.qk_norm=false",), "bounded": bounded}
    for name, norms in runs.items():
        if not (folder / name / "loss.png").exists():
            _protlm(
                *("train", *training, "attention=softmax", *norms),
                *(f"data.dir={data}", f"run_dir={folder / name}"),
            )
    return [folder / name for name in runs]


def _protlm(*arguments: str) -> None:
    code = subprocess.run([sys.executable, "-m", "protlm", *arguments], check=False).returncode
    if code:
        sys.exit(code)


def layer_table(rows: Sequence[Row], model: str, features: Sequence[int]) -> Table:
    """Returns norms and errors of hidden states, layer by layer."""
    norms = medians(rows, model, SOFTMAX, NORM)
    largest = medians(rows, model, SOFTMAX, LARGEST_NORM)
    columns = [(UNIFORM, 0), *((POSITIVE, m) for m in features), (OPTIMAL, features[-1])]
    headings = [f"{name} {m}" if m else name for name, m in columns]
    table = Table(
        *("block n", "E|q̂+k̂|² (largest head)", *headings),
        box=MARKDOWN,
        title=f"{model}: relative error after block n, blocks 1 to n replaced (block n alone)",
    )
    for _, layer in norms:
        cells = []
        for name, m in columns:
            error = medians(rows, model, name, CUMULATIVE)[m, layer]
            alone = medians(rows, model, name, SINGLE)[m, layer]
            cells.append(f"{error:.2g} ({alone:.2g})")
        norm = f"{norms[0, layer]:.1f} ({largest[0, layer]:.1f})"
        table.add_row(str(layer), norm, *cells)
    return table


def lost(rows: Sequence[Row], model: str, estimator: str, num_features: int) -> float:
    """Returns the fraction of softmax's gain over uniform attention, in nats, that is lost."""

    def nats(name: str, m: int) -> float:
        return math.log(medians(rows, model, name, PERPLEXITY)[m, 0])

    gained = nats(UNIFORM, 0) - nats(SOFTMAX, 0)
    return (nats(estimator, num_features) - nats(SOFTMAX, 0)) / gained


def score_table(rows: Sequence[Row], model: str) -> Table:
    """Returns masked perplexity and accuracy against the number of features."""
    table = Table(
        *("attention", "R", "perplexity", "accuracy", "of softmax's gain lost"),
        box=MARKDOWN,
        title=f"{model}: masked residues, all blocks replaced",
    )
    for name in (SOFTMAX, POSITIVE, OPTIMAL, UNIFORM):
        accuracies = medians(rows, model, name, ACCURACY)
        for (m, _), perplexity in medians(rows, model, name, PERPLEXITY).items():
            table.add_row(
                name,
                str(m or ""),
                f"{perplexity:.2f}",
                f"{accuracies[m, 0]:.1%}",
                f"{lost(rows, model, name, m):.1%}",
            )
    return table


def figure(rows: Sequence[Row]) -> "Figure":
    """Draws errors of hidden states by layer, and perplexity against R, for each model."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row.model for row in rows))
    drawn = Figure(figsize=(7.8, 1.9 * len(models) + 0.7), layout="constrained")
    panels = drawn.subplots(len(models), 3, squeeze=False, sharex="col", sharey="col")
    for line, model in zip(panels, models, strict=True):
        _state_panel(line[0], rows, model, CUMULATIVE)
        _state_panel(line[1], rows, model, SINGLE)
        _score_panel(line[2], rows, model)
        for axes, what in zip(
            line, ("blocks 1 to n replaced", "block n alone", "all blocks"), strict=True
        ):
            axes.set_title(f"{model}: {what}", fontsize=8)
            axes.tick_params(labelsize=7)
    for axes, what in zip(panels[-1], ("block n", "block n", "random features R"), strict=True):
        axes.set_xlabel(what, fontsize=8)
    drawn.supylabel("relative error of the hidden state after block n", fontsize=8)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside upper left", ncols=4, frameon=False, fontsize=7)
    handles, labels = panels[0, 2].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside upper right", ncols=2, frameon=False, fontsize=7)
    return drawn


def _state_panel(axes: "Axes", rows: Sequence[Row], model: str, quantity: str) -> None:
    import matplotlib

    errors = medians(rows, model, POSITIVE, quantity)
    features = sorted({m for m, _ in errors})
    colors = matplotlib.colormaps["viridis_r"]
    for place, m in enumerate(features):
        by_layer = {layer: error for (n, layer), error in errors.items() if n == m}
        color = colors((place + 0.5) / len(features))
        axes.plot(
            *zip(*by_layer.items(), strict=True), color=color, linewidth=1.2, label=f"R = {m}"
        )
    pooled = {layer: error for (_, layer), error in medians(rows, model, UNIFORM, quantity).items()}
    axes.plot(*zip(*pooled.items(), strict=True), "--", color="0.4", label=UNIFORM)
    axes.set(yscale="log", xticks=list(pooled))


def _score_panel(axes: "Axes", rows: Sequence[Row], model: str) -> None:
    for name, style in ((SOFTMAX, "-"), (UNIFORM, "--")):
        bar = medians(rows, model, name, PERPLEXITY)[0, 0]
        axes.axhline(bar, color="0.4", linestyle=style, linewidth=1, label=name)
    for name, color in ((POSITIVE, "#0072B2"), (OPTIMAL, "#009E73")):
        curve = {m: value for (m, _), value in medians(rows, model, name, PERPLEXITY).items()}
        axes.plot(*zip(*curve.items(), strict=True), marker=".", color=color, label=name)
    features = list(curve)
    axes.set(xscale="log", ylabel="masked perplexity")
    axes.yaxis.label.set_fontsize(8)
    axes.set_xticks(features[::2], [str(m) for m in features[::2]])
    axes.minorticks_off()


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Writes a line for every number."""
    with complete_file(path, overwrite=True) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def main() -> None:
    """Trains the models if none is given, measures, prints the tables, and draws the figure."""
    parser = argparse.ArgumentParser(description="Replace the attention of a trained model.")
    parser.add_argument("--model", nargs="*", type=Path, help="runs of attention=softmax")
    parser.add_argument("--data", type=Path, help="the data set, with --model")
    parser.add_argument("--split", default=SPLIT, help="the split to score")
    parser.add_argument("--quick", action="store_true", help="a tiny model, few features")
    parser.add_argument("--out", default=Path("outputs/propagation"), type=Path)
    parser.add_argument("--figure", default=Path("outputs/propagation.png"), type=Path)
    arguments = parser.parse_args()
    if bool(arguments.model) != bool(arguments.data):
        raise UserError("--model and --data belong together: give both or neither")

    study = QUICK if arguments.quick else FULL
    models = arguments.model or trained(arguments.out, study.training)
    data = arguments.data or arguments.out / "data"
    rows: list[Row] = []
    console = Console(width=160)
    for path in models:
        subject = Subject(path, data, split=arguments.split, proteins=study.proteins)
        rows += subject.references()
        for num_features in track(study.features, f"Replacing in {path.name}", transient=True):
            for draw in range(study.draws):
                rows += subject.estimates(num_features, draw)
        console.print(layer_table(rows, subject.name, study.features[::2]))
        console.print(score_table(rows, subject.name))
    write_csv(rows, arguments.out / "rows.csv")
    save_figure(figure(rows), arguments.figure, overwrite=True)
    print(f"Wrote {arguments.out / 'rows.csv'} and {arguments.figure}")


if __name__ == "__main__":
    exit_with_message(main)
