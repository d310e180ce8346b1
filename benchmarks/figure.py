"""The cost figure of the Performer paper (arXiv 2009.14794, figure 3): time against length."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.cases import PERFORMER_PYTORCH, RETURNS_V, SDPA, Case
from benchmarks.results import Result
from protlm.paths import complete_file

# Okabe and Ito's palette, told apart by colour-blind people too; marker and name in the legend.
_STYLES = {
    SDPA: ("#D55E00", "s", "softmax (scaled_dot_product_attention)"),
    PERFORMER_PYTORCH: ("#E69F00", "^", "performer-pytorch 1.1.4"),
    "performer_softmax": ("#0072B2", "o", "protlm, softmax kernel"),
    "performer_relu": ("#009E73", "D", "protlm, ReLU kernel"),
    "cuDNN": ("#CC79A7", "v", "softmax (cuDNN)"),
    "fla-core": ("#56B4E9", "P", "fla-core 0.6.0"),
    RETURNS_V: ("#777777", "", "attention returns V"),
}


def cost_figure(found: Sequence[Result], *, dtype: str, where: str) -> Figure:
    """Draws a panel for each mode, forward and backward, for one dtype.

    Each kernel stands with one number of features, the one of the bars: m = 64 for the ReLU kernel
    and the largest there is for the others.

    Args:
        found: what was measured.
        dtype: whose times are drawn.
        where: the machine, for the caption.
    """
    measured = [r for r in found if r.measured and r.case.dtype == dtype]
    modes = list(dict.fromkeys(r.case.causal for r in measured))
    figure = Figure(figsize=(8.4, 0.9 + 3.3 * len(modes)), layout="constrained")
    panels = figure.subplots(len(modes), 2, sharex=True, sharey=True, squeeze=False)
    for row, causal in enumerate(modes):
        for axes, part in zip(panels[row], ("forward", "backward"), strict=True):
            _panel(axes, [r for r in measured if r.case.causal == causal], part)
            axes.set_title(f"{'causal' if causal else 'bidirectional'}, {part}", fontsize=10)
        panels[row][0].set_ylabel("time (s)")
    for axes in panels[-1]:
        axes.set_xlabel("length L (positions)")
    # Some contenders have one mode only.
    drawn = {line.get_label(): line for axes in panels.flat for line in axes.lines}
    figure.legend(
        handles=drawn.values(), loc="outside upper center", ncols=3, frameon=False, fontsize=9
    )
    about = (
        f"one sequence, 8 heads of 64, {dtype}, {where}; a line ends where a pass costs too much"
    )
    figure.supxlabel(about, fontsize=8, color="#555555")
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes the figure as PNG, under its name only when it is complete."""
    with complete_file(path, overwrite=True) as temporary:
        figure.savefig(temporary, format="png", dpi=200)


def _panel(axes: Axes, measured: Sequence[Result], part: str) -> None:
    for name, (colour, marker, label) in _STYLES.items():
        line = _drawn_line(name, measured)
        if not line:
            continue
        features = line[0].case.features
        axes.plot(
            [result.case.length for result in line],
            [result.held.median(result.case, part) for result in line],
            color=colour,
            marker=marker,
            markersize=4,
            linewidth=1.5,
            linestyle="--" if name == RETURNS_V else "-",
            label=label if features is None else f"{label}, m={features}",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = sorted({result.case.length for result in measured})
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=45, fontsize=8)
    axes.minorticks_off()
    axes.tick_params(axis="y", labelsize=8)
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _drawn_line(name: str, measured: Sequence[Result]) -> list[Result]:
    lines: dict[Case, list[Result]] = {}
    for result in measured:
        if result.case.contender == name:
            lines.setdefault(result.case.at(0), []).append(result)
    if not lines:
        return []
    choose = min if name == "performer_relu" else max
    chosen = choose(lines, key=lambda line: line.features or 0)
    return sorted(lines[chosen], key=lambda result: result.case.length)
