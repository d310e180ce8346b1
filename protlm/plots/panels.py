"""Empty figures, and the colors of all."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colorblind-safe palette.
BLUE, ORANGE, GRAY, GREEN = "#0072B2", "#D55E00", "#999999", "#009E73"


def new_figure(width: float, height: float) -> "tuple[Figure, Axes]":
    """Returns a figure of one panel, in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()
