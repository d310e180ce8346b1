"""Figures of losses, attention maps, contacts and the effects of substitutions.

Each function returns a matplotlib figure without a window or global state, which can be drawn on a
machine without a screen, shown in a notebook, and saved.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from protlm.analysis.precision import (
    ALL_SEPARATIONS,
    MIN_SEPARATION,
    SEPARATIONS,
    precision_at,
    top_pairs,
)
from protlm.data.vocabulary import STANDARD
from protlm.system.errors import UserError
from protlm.system.paths import complete_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

# Okabe and Ito's colorblind-safe palette.
BLUE, ORANGE, GRAY, GREEN = "#0072B2", "#D55E00", "#999999", "#009E73"
_CYCLE = (BLUE, GRAY, ORANGE, GREEN, "#CC79A7", "#56B4E9", "#E69F00", "#000000")
# What is measured during training, and its labels.
_MEASURED = {
    "measured_contacts_short": "contacts, short range",
    "measured_contacts_long": "contacts, long range",
    "measured_secondary_structure": "secondary structure",
    "measured_zero_shot": "100 × zero-shot Spearman",
}
# Amino acids: aliphatic, aromatic, polar, positive, negative, and those apart.
_BY_PROPERTY = "AVLIMFYWSTNQHKRDEGCP"
_SCAN_COLUMNS, _MOST_SCAN_ROWS = 60, 10
_DPI = 150
# Metadata to remove from each format: the time, and the version of matplotlib.
_METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "svg": {"Date": None, "Creator": None},
}


def _new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, *, share: bool = False
) -> "tuple[Figure, Any]":
    """Returns a figure, in inches, and its panels, which may share their axes: [rows, columns]."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, sharex=share, sharey=share, squeeze=False)


def save_figure(figure: "Figure", path: Path, *, overwrite: bool = False) -> None:
    """Writes a figure as PNG, PDF or SVG by the suffix of `path`, reproducibly to the byte."""
    import matplotlib

    format_ = path.suffix.lower().removeprefix(".")
    # Without the salt, the identifiers inside an SVG are random.
    with (
        complete_file(path, overwrite=overwrite) as temporary,
        matplotlib.rc_context({"svg.hashsalt": "protlm"}),
    ):
        figure.savefig(temporary, format=format_, dpi=_DPI, metadata=_METADATA.get(format_))


def loss_curve(rows: list[dict[str, float]]) -> "Figure":
    """Draws training and validation loss, and what is measured, against the optimizer step.

    Each row has `step` and `train_loss` or `valid_loss`, in nats per residue, or values of
    `_MEASURED`, fractions or correlations, which are drawn against the right axis. The last
    `valid_unigram_loss`, that of residue frequencies, is a line.
    """
    train, valid = _series(rows, "train_loss"), _series(rows, "valid_loss")
    if not len(train) and not len(valid):
        raise UserError("there is no loss to draw: no row has a train_loss or a valid_loss")
    figure, ((axes,),) = _new_figure(6.4, 4.0)
    if len(train):
        steps, losses = train.T
        axes.plot(steps, losses, color=BLUE, alpha=0.25, linewidth=0.8)
        axes.plot(steps, _running_mean(losses), color=BLUE, label="training (running mean)")
    if len(valid):
        axes.plot(*valid.T, "o-", color=ORANGE, markersize=4, linewidth=1, label="validation")
    unigram = _series(rows, "valid_unigram_loss")
    if len(unigram):
        axes.axhline(float(unigram[-1, 1]), color=GRAY, linestyle="--", label="residue frequencies")
    axes.set(xlabel="optimizer step", ylabel="loss (nats per residue)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    _measured(axes, rows)
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    return figure


def relatives_curve(values: Mapping[str, Any]) -> "Figure":
    """Draws the nats of each predictor against the number of relatives, and those of controls.

    The values are what `evaluation=relatives` returns for a split. The query's own copy, far below
    all others, is left out.
    """
    figure, ((axes,),) = _new_figure(6.4, 4.4)
    labels = [label for label in values["curve"] if label.isdigit()]
    for who, color in zip(values["curve"]["0"], _CYCLE, strict=False):
        found = [values["curve"][label][who]["nats"] for label in labels]
        means = [one["mean"] for one in found]
        width = 2.0 if who == "model" else 1.0
        axes.plot(range(len(labels)), means, "o-", color=color, linewidth=width, label=who)
        if who == "model" and found[0]["low"] is not None:
            ends = [[one[end] for one in found] for end in ("low", "high")]
            axes.fill_between(range(len(labels)), *ends, color=color, alpha=0.15, linewidth=0)
    shown = [name for name in values["controls"] if not name.startswith(("order", "own"))]
    for name, marker in zip(shown, "x+", strict=False):
        mean = values["controls"][name]["nats"]["mean"]
        axes.plot(len(labels) - 1, mean, marker, color="black", label=name)
    axes.set_xticks(range(len(labels)), labels)
    axes.set(xlabel="relatives", ylabel="nats per target (mean over families)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    return figure


def _measured(axes: "Axes", rows: list[dict[str, float]]) -> None:
    """Draws what is measured in training against an axis on the right, if there are any."""
    found = {label: _series(rows, name) for name, label in _MEASURED.items()}
    if not any(len(series) for series in found.values()):
        return
    right = axes.twinx()
    for (label, series), style in zip(found.items(), ("--", ":", "-.", "-"), strict=True):
        if len(series):
            steps, fractions = series.T
            right.plot(steps, 100 * fractions, style, color=GREEN, marker=".", label=label)
    lowest = min(series[:, 1].min() for series in found.values() if len(series))
    right.set_ylim(bottom=None if lowest < 0 else 0)
    right.set_ylabel("measured (%)")
    right.spines[["top"]].set_visible(False)


def _series(rows: list[dict[str, float]], name: str) -> np.ndarray:
    """Returns the (step, value) pairs of one column, without missing values, float64 [n, 2]."""
    pairs = [(row["step"], row[name]) for row in rows if name in row and np.isfinite(row[name])]
    return np.array(pairs, dtype=np.float64).reshape(-1, 2)


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Returns a moving average over a twentieth of the values, narrower at both ends."""
    half = max(len(values) // 40, 1)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    here = np.arange(len(values))
    low, high = np.maximum(here - half, 0), np.minimum(here + half + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def attention_grid(
    maps: dict[int, np.ndarray], *, title: str, heads: Sequence[int] | None = None
) -> "Figure":
    """Draws attention maps in a grid of layers (rows) and heads (columns).

    Each map has its own color scale, from 0 to the 99th percentile of its entries: the maps of
    linear mechanisms differ in contrast by orders of magnitude. Maps are HLL by layer number, as
    `PretrainedModel.attention_maps` has them: position 0 is `<cls>`, residue n is at position n,
    and the last position is `<eos>`. Heads are numbered from 1, unless their numbers are given.
    """
    if not maps:
        raise UserError("there is no attention map to draw: name at least one layer")
    num_heads = max(len(map_HLL) for map_HLL in maps.values())
    size = (max(1.35 * num_heads + 0.5, 4.5), 1.5 * len(maps) + 0.9)
    figure, grid = _new_figure(*size, len(maps), num_heads, share=True)
    for row, (layer, map_HLL) in zip(grid, sorted(maps.items()), strict=True):
        numbers = heads or range(1, len(map_HLL) + 1)
        for axes, head, map_LL in zip(row, numbers, map_HLL, strict=False):
            top = float(np.quantile(map_LL, 0.99)) or float(map_LL.max()) or 1.0
            axes.imshow(map_LL, cmap="viridis", vmin=0.0, vmax=top, interpolation="nearest")
            axes.set_title(f"layer {layer} head {head}", fontsize=7, pad=3)
            axes.tick_params(labelsize=6, length=2)
            axes.label_outer()
    figure.suptitle(f"{title}\neach map from 0 (dark) to its 99th percentile (light)", fontsize=9)
    figure.supxlabel("position attended to (residue number)", fontsize=8)
    figure.supylabel("position that attends (residue number)", fontsize=8)
    return figure


def contact_figure(
    probabilities_LL: np.ndarray, contacts_LL: np.ndarray | None, *, title: str
) -> "Figure":
    """Draws contact probabilities above the diagonal, true contacts and the top L pairs below.

    The top L pairs are the most probable ones 6 or more apart. Without a known structure they are
    all drawn alike. Contacts are 1, 0, or -1 where unresolved. The precision is appended to the
    title.
    """
    length = len(probabilities_LL)
    known_LL = np.zeros((length, length), np.int8) if contacts_LL is None else contacts_LL
    figure, ((axes,),) = _new_figure(6.4, 5.8)
    hidden_LL = np.tril(np.ones((length, length), dtype=bool), MIN_SEPARATION - 1)
    edges = (0.5, length + 0.5, length + 0.5, 0.5)
    image = axes.imshow(
        np.ma.masked_where(hidden_LL, probabilities_LL), cmap="Blues", vmin=0.0, extent=edges
    )
    figure.colorbar(image, ax=axes, shrink=0.75, label="predicted contact probability")
    rows, columns = top_pairs(probabilities_LL, known_LL, separation=ALL_SEPARATIONS)
    if np.ptp(probabilities_LL) == 0:
        # Equal probabilities predict nothing: the order of pairs would be random.
        rows, columns = rows[:0], columns[:0]
        title = f"{title}\nno prediction: no head carries contacts, all pairs are equal"
    size = min(12.0, 2400.0 / length)

    def mark(some: np.ndarray, size: float, marker: str, color: str, label: str) -> None:
        """Marks pairs (i < j) below the diagonal, by positions in the sequence, from 1."""
        i, j = some + 1
        axes.scatter(i, j, s=size, marker=marker, c=color, linewidths=0.8, label=label)

    pairs = np.stack([rows, columns])
    if contacts_LL is None:
        mark(pairs, size, "o", BLUE, "top L predictions")
    else:
        true = np.array(np.nonzero(np.triu(contacts_LL == 1, MIN_SEPARATION)))
        mark(true, 2 * size, "s", "#cccccc", "true contact")
        hit = contacts_LL[rows, columns] == 1
        mark(pairs[:, hit], size, "o", BLUE, "top L, true")
        mark(pairs[:, ~hit], size, "x", ORANGE, "top L, false")
        if len(rows):
            texts = []
            for separation in (ALL_SEPARATIONS, SEPARATIONS["long"]):
                found = precision_at(probabilities_LL, contacts_LL, separation)
                texts.append("none" if np.isnan(found) else f"{found:.0%}")
            title = f"{title}\nP@L {texts[0]} (6 or more apart), {texts[1]} (24 or more)"
    axes.set_title(title, fontsize=10)
    axes.set(xlabel="position in the sequence", ylabel="position in the sequence")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def reconstruction(unexplained: Mapping[int, float], k: int) -> "Figure":
    """Draws the fraction of the variance that sparse features leave unexplained, by their number.

    `k` is the number that they were trained with.
    """
    figure, ((axes,),) = _new_figure(4.8, 3.2)
    axes.plot([*unexplained], [*unexplained.values()], "o-", color=BLUE)
    axes.axvline(k, color=GRAY, linestyle="--", label="trained with")
    axes.set_xscale("log")
    axes.set_xticks([*unexplained], [str(one) for one in unexplained])
    axes.minorticks_off()
    axes.set(
        xlabel="active features of a residue, k", ylabel="fraction of the variance unexplained"
    )
    axes.legend(frameon=False)
    return figure


def benchmark_figure(rows: Sequence[tuple], models: Sequence[str]) -> "Figure":
    """Draws the values of predictors below each task, with their intervals; baselines are gray.

    Rows have a task, a metric, a predictor, a value and its bounds, which may be None, the number
    of proteins, and the source of a published value, which is a square.
    """
    lines: list[tuple[str, tuple | None]] = []
    for task, some in groupby((row for row in rows if row[3] is not None), lambda row: row[:2]):
        lines += [(", ".join(task), None), *((row[2], row) for row in some)]
    figure, ((axes,),) = _new_figure(7.5, 0.6 + 0.17 * len(lines))
    for place, (name, row) in enumerate(lines):
        if row is not None:
            low, value, high = np.array([row[4], row[3], row[5]], float)
            error = np.nan_to_num(np.maximum([[value - low], [high - value]], 0))
            color = BLUE if name in models else ORANGE if row[-1] else GRAY
            marker = "s" if row[-1] else "o"
            axes.errorbar(
                value, place, xerr=error, fmt=marker, color=color, linewidth=1, markersize=4
            )
    axes.set_yticks(range(len(lines)), [name for name, _ in lines], fontsize=7)
    for label, (_, row) in zip(axes.get_yticklabels(), lines, strict=True):
        label.set_fontweight("bold" if row is None else "normal")
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_xlabel("value and 95 % interval; squares are published figures", fontsize=8)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def scan_figure(
    scores: np.ndarray, wild_type: str, *, title: str, first_residue: int = 1
) -> "Figure":
    """Draws the scores of all substitutions of a protein, in up to ten rows of 60 or more residues.

    The scores are residues by the 20 amino acids in the order of `STANDARD`. The color scale is
    symmetric about 0, the score of the wild type, whose residues are dots, and ends at the 99th
    percentile of the absolute scores.
    """
    width = max(_SCAN_COLUMNS, -(-len(wild_type) // _MOST_SCAN_ROWS))
    starts = range(0, len(wild_type), width)
    top = float(np.quantile(np.abs(scores), 0.99)) or 1.0
    figure, panels = _new_figure(9.0, 1.9 * len(starts) + 0.9, len(starts))
    images = []
    for (axes,), start in zip(panels, starts, strict=True):
        part = slice(start, start + width)
        first = start + first_residue
        images.append(_scan_row(axes, scores[part], wild_type[part], first=first, top=top))
        # A shorter last row has the scale of the others.
        axes.set_xlim(first - 0.5, first + min(width, len(wild_type)) - 0.5)
        numbers = range(first, first + len(wild_type[part]))
        axes.set_xticks([tick for tick in axes.get_xticks() if tick in numbers])
    shrink = min(0.75, 2 / len(starts) + 0.15)
    figure.colorbar(images[0], ax=panels[:, 0], shrink=shrink, label="score (nats)")
    figure.suptitle(f"{title}\ndots: residues of the wild type", fontsize=9)
    figure.supxlabel("residue number", fontsize=8)
    figure.supylabel("substituted by", fontsize=8)
    return figure


def _scan_row(
    axes: "Axes", scores: np.ndarray, wild_type: str, *, first: int, top: float
) -> "AxesImage":
    """Draws some residues of a scan, the first of which has the number `first`."""
    order = [STANDARD.index(letter) for letter in _BY_PROPERTY]
    edges = (first - 0.5, first + len(wild_type) - 0.5, len(order) - 0.5, -0.5)
    image = axes.imshow(
        scores[:, order].T,
        cmap="RdBu",
        aspect="auto",
        vmin=-top,
        vmax=top,
        interpolation="nearest",
        extent=edges,
    )
    standard = [i for i, letter in enumerate(wild_type) if letter in _BY_PROPERTY]
    own = [_BY_PROPERTY.index(wild_type[i]) for i in standard]
    axes.scatter(
        np.array(standard) + first, own, s=min(3.0, 300 / len(wild_type)), c="black", linewidths=0
    )
    axes.set_yticks(range(len(order)), list(_BY_PROPERTY), fontsize=5)
    axes.tick_params(axis="x", labelsize=6, length=2)
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)
    return image
