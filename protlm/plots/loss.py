"""The loss of a training run."""

from typing import TYPE_CHECKING

import numpy as np

from protlm.plots.panels import BLUE, GRAY, GREEN, ORANGE, new_figure
from protlm.system.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The probes of training and their labels.
_PROBES = {
    "probe_contacts_short": "contacts, short range",
    "probe_contacts_long": "contacts, long range",
    "probe_secondary_structure": "secondary structure",
    "probe_zero_shot": "100 × zero-shot Spearman",
}


def loss_curve(rows: list[dict[str, float]], *, baseline: float | None = None) -> "Figure":
    """Draws training and validation loss, and probes, against the optimizer step.

    Args:
        rows: each has `step` and `train_loss` or `valid_loss`, in nats per residue, or values of
            `_PROBES`, fractions or correlations, which are drawn against the right axis.
        baseline: the loss of residue frequencies, in nats per residue; by default the last
            `valid_unigram_loss` of the rows, if any.
    """
    train = _series(rows, "train_loss")
    valid = _series(rows, "valid_loss")
    if not len(train) and not len(valid):
        raise UserError("there is no loss to draw: no row has a train_loss or a valid_loss")
    figure, axes = new_figure(6.4, 4.0)
    if len(train):
        steps, losses = train.T
        axes.plot(steps, losses, color=BLUE, alpha=0.25, linewidth=0.8)
        axes.plot(steps, _running_mean(losses), color=BLUE, label="training (running mean)")
    if len(valid):
        axes.plot(*valid.T, "o-", color=ORANGE, markersize=4, linewidth=1, label="validation")
    unigram = _series(rows, "valid_unigram_loss")
    if baseline is None and len(unigram):
        baseline = float(unigram[-1, 1])
    if baseline is not None:
        axes.axhline(baseline, color=GRAY, linestyle="--", label="residue frequencies")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per residue)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    _probes(axes, rows)
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    return figure


def _probes(axes: "Axes", rows: list[dict[str, float]]) -> None:
    """Draws the probes of training against an axis on the right, if there are any."""
    found = {label: _series(rows, name) for name, label in _PROBES.items()}
    if not any(len(series) for series in found.values()):
        return
    right = axes.twinx()
    for (label, series), style in zip(found.items(), ("--", ":", "-.", "-"), strict=True):
        if len(series):
            steps, fractions = series.T
            right.plot(steps, 100 * fractions, style, color=GREEN, marker=".", label=label)
    lowest = min(series[:, 1].min() for series in found.values() if len(series))
    right.set_ylim(bottom=None if lowest < 0 else 0)
    right.set_ylabel("probes (%)")
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
