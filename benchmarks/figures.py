"""The figures of the attention benchmarks: time and memory against the length."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness import Comparison

# Okabe and Ito's palette; contenders of one color differ in their marker.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#000000", "#999")
_MARKERS = "oD^vsP*X"
# Below this length overhead dominates, so exponents are fitted from here on.
FITTED_FROM = 2048

Costs = Mapping[int, float]


def seconds_of(name: str, held: Mapping[int, Comparison]) -> dict[int, float]:
    """Returns the median seconds of a contender by length, where it was measured."""
    costs = {length: each.median(name) for length, each in held.items()}
    return {length: cost for length, cost in costs.items() if cost is not None}


def peaks_of(name: str, held: Mapping[int, Comparison]) -> dict[int, float]:
    """Returns the peak memory of a contender by length, in MB, where it was measured."""
    facts = {length: each.facts.get(name) for length, each in held.items()}
    return {length: fact["peak_bytes"] / 1e6 for length, fact in facts.items() if fact}


def cost_figure(panels: Mapping[str, Mapping[str, Costs]], *, about: str) -> Figure:
    """Draws panels side by side, one line for each contender.

    The legend lists the contenders of the first panel by their cost at the right end, the most
    expensive first, with the exponent of the cost in the length.

    Args:
        panels: costs by length, by contender, by the title of the panel.
        about: the caption.
    """
    figure = Figure(figsize=(5.5 * len(panels), 5.2), layout="constrained")
    looks = styles(sorted({name for lines in panels.values() for name in lines}))
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, lines) in zip(grid, panels.items(), strict=True):
        drawn = [name for name, costs in lines.items() if costs]
        for name in sorted(drawn, key=lambda name: _order(lines[name]), reverse=True):
            color, marker = looks[name]
            axes.plot(
                list(lines[name]),
                list(lines[name].values()),
                color=color,
                marker=marker,
                markersize=4,
                linewidth=2.4 if name in ("softmax", "SDPA") else 1.2,
                label=_label(name, lines[name]),
            )
        _finish(axes, title, sorted({length for line in lines.values() for length in line}))
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
    figure.supxlabel(about, fontsize=8, color="#555555")
    return figure


def exponent(costs: Costs) -> float | None:
    """Returns the slope of log(cost) over log(length) by least squares, or None below two points.

    Only lengths of at least `FITTED_FROM` count.
    """
    points = np.log([(n, cost) for n, cost in costs.items() if n >= FITTED_FROM] or [(1, 1)])
    return float(np.polyfit(points[:, 0], points[:, 1], 1)[0]) if len(points) > 1 else None


def styles(contenders: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Returns the color and the marker of each contender, by name."""
    return {
        name: (_COLORS[place % len(_COLORS)], _MARKERS[place // len(_COLORS) % len(_MARKERS)])
        for place, name in enumerate(contenders)
    }


def _label(name: str, costs: Costs) -> str:
    slope = exponent(costs)
    return name if slope is None else f"{name}, L^{slope:.2f}"


def _order(costs: Costs) -> float:
    # A line that ends early is extended as a square: its contender became too expensive.
    longest = max(costs)
    return costs[longest] * (2.0**40 / longest) ** 2


def _finish(axes: Axes, title: str, lengths: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=45, fontsize=8)
    axes.minorticks_off()
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("length L (positions)")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
