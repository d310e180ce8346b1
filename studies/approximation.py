"""Measures how well FAVOR+ estimates softmax attention, as in arXiv 2009.14794, Fig. 4.

    python -m studies.approximation [--quick] [--csv FILE] [--figure FILE]

Each sample draws its own inputs and its own projection. The tables report medians over the samples;
the bars of the figure reach from the first to the third quartile.
"""

import argparse
import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import MARKDOWN
from rich.console import Console
from rich.progress import track
from rich.table import Table

from protlm.plots import save_figure
from protlm.system.paths import complete_file
from studies.estimates import (
    IID,
    ORTHOGONAL,
    UNIFORM,
    Row,
    Setting,
    curve,
    features_to_beat_uniform,
    measure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The shipped number of features.
TABLE_FEATURES = 256
# The errors that the figure shows.
LIMITS = (0.003, 10.0)
# The estimators of the paper's figure, which are drawn with orthogonal and with iid rows.
COMPARED = ("positive", "trigonometric")
# Okabe and Ito's palette, which color-blind readers can distinguish.
COLORS = {
    "trigonometric": "#D55E00",
    "positive": "#0072B2",
    "hyperbolic": "#56B4E9",
    "OPRF": "#009E73",
    "antithetic OPRF": "#000000",
    "regularized": "#CC79A7",
}


@dataclass(frozen=True)
class Study:
    """A set of inputs, numbers of features, and a number of samples."""

    settings: tuple[Setting, ...]
    features: tuple[int, ...]
    samples: int


DEVIATIONS = (0.25, 0.5, 0.75, 1.0)
# The length and the width of the paper's study, then a protein and the width of a model's head.
SIZES = ((4096, 16), (1024, 64))
FULL = Study(
    settings=tuple(Setting(*size, deviation) for size in SIZES for deviation in DEVIATIONS),
    features=tuple(2**power for power in range(4, 13)),
    samples=15,
)
QUICK = Study(
    settings=tuple(Setting(512, 16, deviation) for deviation in DEVIATIONS),
    features=(16, 64, 256, 1024),
    samples=5,
)


def by_setting(rows: Sequence[Row]) -> dict[Setting, list[Row]]:
    """Returns the rows of each setting, in the order they were measured."""
    groups: dict[Setting, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.setting, []).append(row)
    return groups


def error_table(rows: Sequence[Row]) -> Table:
    """Returns relative errors with orthogonal features, and the smallest useful R."""
    table = Table(
        *("K", "σ", "E|q̂+k̂|²", "R for 1", UNIFORM, *COLORS),
        box=MARKDOWN,
        title=f"Relative error of the output with R = {TABLE_FEATURES} orthogonal features "
        "(in brackets the R from which it stays below uniform attention's)",
    )
    for setting, group in by_setting(rows).items():
        cells = []
        for name in COLORS:
            found = curve(group, name, ORTHOGONAL)
            error = found.median[found.features == TABLE_FEATURES].item()
            cells.append(f"{error:.2g} ({features_to_beat_uniform(group, name) or 'none'})")
        table.add_row(
            str(setting.head_dim),
            f"{setting.deviation:g}",
            f"{setting.mean_square_sum:g}",
            f"{setting.features_for_deviation_1:.2g}",
            f"{curve(group, UNIFORM).median.item():.2g}",
            *cells,
        )
    return table


def projection_table(rows: Sequence[Row]) -> Table:
    """Returns the paper's figure in numbers: mean square errors of orthogonal and of iid rows."""
    setting = next(iter(by_setting(rows)))
    pairs = list(product(COMPARED, (ORTHOGONAL, IID)))
    table = Table(
        *("σ", "R", *(f"{name}, {projection}" for name, projection in pairs)),
        box=MARKDOWN,
        title=f"Mean square error of the output, L = {setting.length}, K = {setting.head_dim}: "
        "median (quartiles)",
    )
    for here, group in by_setting(rows).items():
        if here.head_dim != setting.head_dim:
            continue
        curves = [curve(group, *pair, of="mean_square_error") for pair in pairs]
        for place, num_features in enumerate(curves[0].features):
            cells = (
                f"{one.median[place]:.1e} ({one.low[place]:.1e}, {one.high[place]:.1e})"
                for one in curves
            )
            table.add_row(f"{here.deviation:g}", str(num_features), *cells)
    return table


def figure(rows: Sequence[Row]) -> "Figure":
    """Draws the relative error against R, one panel per setting; the dashed line is Lemma 2's."""
    from matplotlib.figure import Figure

    groups = by_setting(rows)
    columns = len({setting.deviation for setting in groups})
    lines = len(groups) // columns
    drawn = Figure(figsize=(1.85 * columns + 0.3, 1.6 * lines + 0.7), layout="constrained")
    panels = drawn.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for axes, (setting, group) in zip(panels.flat, groups.items(), strict=True):
        _panel(axes, setting, group)
    drawn.supxlabel("random features R", fontsize=9)
    drawn.supylabel("relative error of the output", fontsize=9)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside upper center", ncols=5, frameon=False, fontsize=8)
    return drawn


def _panel(axes: "Axes", setting: Setting, rows: Sequence[Row]) -> None:
    bar = curve(rows, UNIFORM).median.item()
    axes.axhspan(bar, LIMITS[1], color="0.92", label="worse than uniform")
    for name, color in COLORS.items():
        one = curve(rows, name, ORTHOGONAL)
        bars = (one.median - one.low, one.high - one.median)
        axes.errorbar(
            one.features, one.median, bars, color=color, linewidth=1.2, capsize=1.5, label=name
        )
    for name in COMPARED:
        iid = curve(rows, name, IID)
        axes.plot(
            iid.features, iid.median, ":", color=COLORS[name], linewidth=1, label=f"{name}, {IID}"
        )
    axes.axvline(
        setting.features_for_deviation_1,
        color="0.4",
        linestyle="--",
        linewidth=0.8,
        label="R of deviation 1",
    )
    features = curve(rows, "positive", ORTHOGONAL).features
    axes.set(xscale="log", yscale="log", ylim=LIMITS, xlim=(features[0] / 1.3, features[-1] * 1.3))
    axes.set_xticks(features[::2], [str(number) for number in features[::2]])
    axes.minorticks_off()
    axes.set_title(
        f"K={setting.head_dim}, σ={setting.deviation:g}: E|q̂+k̂|²={setting.mean_square_sum:g}",
        fontsize=8,
    )
    axes.tick_params(labelsize=7)


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Writes a line for every error."""
    lines = [{**asdict(row.setting), **asdict(row)} for row in rows]
    columns = [name for name in lines[0] if name != "setting"]
    with complete_file(path, overwrite=True) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(lines)


def main() -> None:
    """Measures, prints the tables, and writes every error to a CSV file and the figure."""
    parser = argparse.ArgumentParser(description="Measure how well FAVOR+ estimates softmax.")
    parser.add_argument("--quick", action="store_true", help="short inputs, few samples, K = 16")
    parser.add_argument("--csv", default=Path("outputs/approximation.csv"), type=Path)
    parser.add_argument("--figure", default=Path("outputs/approximation.png"), type=Path)
    arguments = parser.parse_args()

    study = QUICK if arguments.quick else FULL
    rows = [
        row
        for setting in track(study.settings, "Estimating softmax", transient=True)
        for row in measure(setting, study.features, study.samples)
    ]
    console = Console(width=200)
    console.print(error_table(rows))
    console.print(projection_table(rows))
    write_csv(rows, arguments.csv)
    save_figure(figure(rows), arguments.figure, overwrite=True)
    print(f"Wrote {arguments.csv} and {arguments.figure}")


if __name__ == "__main__":
    main()
