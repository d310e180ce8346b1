"""The figure of all mechanisms: time and memory against the length."""

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.results import Result, by_line

# A colour for each family, after Okabe and Ito; a marker for each of its members.
_COLOURS = {
    "softmax": "#000000",
    "performer": "#0072B2",
    "linear": "#56B4E9",
    "rfa": "#56B4E9",
    "aft": "#D55E00",
    "linformer": "#999999",
    "nystromformer": "#999999",
    "longformer": "#009E73",
    "bigbird": "#009E73",
    "long_short": "#009E73",
    "hybrid": "#009E73",
    "reformer": "#CC79A7",
}
_OTHER = "#E69F00"
FITTED_FROM = 2048
_MARKERS = "oD^vsP*X"


def cost_figure(found: Sequence[Result], *, where: str) -> Figure:
    """Draws time and peak memory, forward and backward, one line for each mechanism.

    The legend has the order of the lines at their right ends, by time, the dearest first, and the
    exponent of time in the length, fitted from 2,048 positions on.

    Args:
        found: what was measured.
        where: the machine, for the caption.
    """
    lines = by_line(result for result in found if result.measured)
    ordered = sorted(lines, key=lambda line: _cost_at_the_end(lines[line]), reverse=True)
    looks = styles(sorted(line.contender for line in lines))
    figure = Figure(figsize=(11.0, 5.2), layout="constrained")
    time_axes, memory_axes = figure.subplots(1, 2)
    for line in ordered:
        of_line = lines[line]
        lengths = [result.case.length for result in of_line]
        seconds = [result.held.median(result.case) for result in of_line]
        peaks = [result.held.bytes[result.case].peak / 1e6 for result in of_line]
        colour, marker = looks[line.contender]
        label = line.contender + (" (causal)" if line.causal else "")
        slope = exponent({n: s for n, s in zip(lengths, seconds, strict=True) if n >= FITTED_FROM})
        label += "" if slope is None else f", L^{slope:.2f}"
        for axes, costs in ((time_axes, seconds), (memory_axes, peaks)):
            axes.plot(
                lengths,
                costs,
                color=colour,
                marker=marker,
                markersize=4,
                linewidth=2.4 if line.contender == "softmax" else 1.2,
                label=label,
            )
    every_length = sorted({result.case.length for of_line in lines.values() for result in of_line})
    for axes, title in ((time_axes, "time (s)"), (memory_axes, "peak memory (MB)")):
        _finish(axes, title, every_length)
    handles, labels = time_axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
    about = f"forward and backward, one sequence, 8 heads of 64, fp32, {where}; options as shipped"
    figure.supxlabel(about, fontsize=8, color="#555555")
    return figure


def exponent(costs: Mapping[int, float]) -> float | None:
    """The slope of log(cost) over log(length), by least squares; None below two lengths."""
    if len(costs) < 2:
        return None
    points = [(math.log(length), math.log(cost)) for length, cost in costs.items()]
    mean_x, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return covariance / sum((x - mean_x) ** 2 for x, _ in points)


def styles(contenders: Sequence[str]) -> dict[str, tuple[str, str]]:
    """The colour and the marker of each mechanism, by name."""
    found: dict[str, tuple[str, str]] = {}
    for name in contenders:
        family = next((known for known in _COLOURS if name.startswith(known)), "")
        colour = _COLOURS.get(family, _OTHER)
        used = sum(other == colour for other, _ in found.values())
        found[name] = colour, _MARKERS[used % len(_MARKERS)]
    return found


def _cost_at_the_end(of_line: Sequence[Result]) -> float:
    last = of_line[-1]
    # Where a line ends early, it goes on as a square: what ends early costs most.
    return last.held.median(last.case) * (2.0**40 / last.case.length) ** 2


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
