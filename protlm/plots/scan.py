"""The scores of all substitutions of a protein."""

from typing import TYPE_CHECKING, Any

import numpy as np

from protlm.data.vocabulary import STANDARD

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

# Amino acids: aliphatic, aromatic, polar, positive, negative, and those apart.
_BY_PROPERTY = "AVLIMFYWSTNQHKRDEGCP"
_SCAN_COLUMNS, _MOST_SCAN_ROWS = 60, 10


def scan_figure(
    scores: np.ndarray, wild_type: str, *, title: str, first_residue: int = 1
) -> "Figure":
    """Draws the scores of all substitutions of a protein, in up to ten rows of 60 or more residues.

    The color scale is symmetric about 0, the score of the wild type, whose residues are dots, and
    ends at the 99th percentile of the absolute scores.

    Args:
        scores: float64, residues by the 20 amino acids in the order of `STANDARD`.
        wild_type: the sequence.
        title: title of the figure.
        first_residue: the number of the first residue.
    """
    width = max(_SCAN_COLUMNS, -(-len(wild_type) // _MOST_SCAN_ROWS))
    starts = range(0, len(wild_type), width)
    top = float(np.quantile(np.abs(scores), 0.99)) or 1.0
    figure, rows = _new_rows(len(starts))
    images = []
    for axes, start in zip(rows, starts, strict=True):
        part = slice(start, start + width)
        first = start + first_residue
        images.append(_scan_row(axes, scores[part], wild_type[part], first=first, top=top))
        # A shorter last row has the scale of the others.
        axes.set_xlim(first - 0.5, first + min(width, len(wild_type)) - 0.5)
        numbers = range(first, first + len(wild_type[part]))
        axes.set_xticks([tick for tick in axes.get_xticks() if tick in numbers])
    shrink = min(0.75, 2 / len(starts) + 0.15)
    figure.colorbar(images[0], ax=rows, shrink=shrink, label="score (nats)")
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
    drawn = {"cmap": "RdBu", "vmin": -top, "vmax": top, "interpolation": "nearest"}
    image = axes.imshow(scores[:, order].T, aspect="auto", extent=edges, **drawn)
    standard = [i for i, letter in enumerate(wild_type) if letter in _BY_PROPERTY]
    own = [_BY_PROPERTY.index(wild_type[i]) for i in standard]
    size = min(3.0, 300.0 / len(wild_type))
    axes.scatter(np.array(standard) + first, own, s=size, c="black", linewidths=0)
    axes.set_yticks(range(len(order)), list(_BY_PROPERTY), fontsize=5)
    axes.tick_params(axis="x", labelsize=6, length=2)
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)
    return image


def _new_rows(number: int) -> "tuple[Figure, Any]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 1.9 * number + 0.9), layout="constrained")
    return figure, figure.subplots(number, squeeze=False)[:, 0]
