"""Predicted contacts beside true ones."""

from typing import TYPE_CHECKING

import numpy as np

from protlm.analysis.precision import precision, top_pairs
from protlm.plots.panels import BLUE, ORANGE, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ANY_RANGE: tuple[int, int | None] = (6, None)
_MIN_SEPARATION = _ANY_RANGE[0]


def contact_figure(
    probabilities_LL: np.ndarray, contacts_LL: np.ndarray | None, *, title: str
) -> "Figure":
    """Draws contact probabilities above the diagonal, true contacts and the top L pairs below.

    The top L pairs are the most probable ones 6 or more apart. Without a known
    structure they are all drawn alike.

    Args:
        probabilities_LL: predicted probabilities.
        contacts_LL: 1, 0, or -1 where unresolved; None without a known structure.
        title: title of the figure; the precision is appended.
    """
    length = len(probabilities_LL)
    known_LL = np.zeros((length, length), np.int8) if contacts_LL is None else contacts_LL
    figure, axes = new_figure(6.4, 5.8)
    hidden_LL = np.tril(np.ones((length, length), dtype=bool), _MIN_SEPARATION - 1)
    edges = (0.5, length + 0.5, length + 0.5, 0.5)
    image = axes.imshow(
        np.ma.masked_where(hidden_LL, probabilities_LL), cmap="Blues", vmin=0.0, extent=edges
    )
    figure.colorbar(image, ax=axes, shrink=0.75, label="predicted contact probability")
    rows, columns = top_pairs(probabilities_LL, known_LL, separation=_ANY_RANGE)
    if np.ptp(probabilities_LL) == 0:
        # Equal probabilities predict nothing: the order of pairs would be random.
        rows, columns = rows[:0], columns[:0]
        title = f"{title}\nno prediction: no head carries contacts, all pairs are equal"
    size = min(12.0, 2400.0 / length)
    if contacts_LL is None:
        _dots(axes, rows, columns, size, marker="o", color=BLUE, label="top L predictions")
    else:
        true_rows, true_columns = np.nonzero(np.triu(contacts_LL == 1, _MIN_SEPARATION))
        _dots(
            axes,
            true_rows,
            true_columns,
            2 * size,
            marker="s",
            color="#cccccc",
            label="true contact",
        )
        hit = contacts_LL[rows, columns] == 1
        _dots(axes, rows[hit], columns[hit], size, marker="o", color=BLUE, label="top L, true")
        _dots(axes, rows[~hit], columns[~hit], size, marker="x", color=ORANGE, label="top L, false")
        if len(rows):
            title = f"{title}\n{_precision_text(probabilities_LL, contacts_LL)}"
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("position in the sequence")
    axes.set_ylabel("position in the sequence")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def _dots(
    axes: "Axes",
    rows: np.ndarray,
    columns: np.ndarray,
    size: float,
    *,
    marker: str,
    color: str,
    label: str,
) -> None:
    """Marks pairs (i < j) below the diagonal, by positions in the sequence, from 1."""
    axes.scatter(rows + 1, columns + 1, s=size, marker=marker, c=color, linewidths=0.8, label=label)


def _precision_text(probabilities_LL: np.ndarray, contacts_LL: np.ndarray) -> str:
    def percent(separation: tuple[int, int | None]) -> str:
        hits, count = precision(probabilities_LL, contacts_LL, separation=separation, divisor=1)
        return f"{hits / count:.0%}" if count else "none"

    return f"P@L {percent(_ANY_RANGE)} (6 or more apart), {percent((24, None))} (24 or more)"
