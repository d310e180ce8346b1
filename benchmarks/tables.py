"""What the benchmark prints: ratios, memory, who was left out, the roofline, the bars."""

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE
from rich.table import Table

from benchmarks.bars import BARS, Verdict
from benchmarks.cases import PERFORMER_PYTORCH, Case
from benchmarks.results import Result, by_line
from benchmarks.roofline import Machine, work_of
from benchmarks.rounds import Round

_LINE = ("mode", "dtype", "contender")


def ratio_table(found: Sequence[Result], peer: str, part: str) -> Table:
    """How many times faster than a peer each contender is, by length."""
    lengths = sorted({result.case.length for result in found})
    title = {"total": "Forward and backward", "forward": "Forward"}[part]
    same = " with the same m" if peer == PERFORMER_PYTORCH else ""
    same += "\n(performer_relu m=64: the 64 coordinates themselves, without a projection)"
    table = _table(f"{title}: times faster than {peer}{same}", _LINE, [f"{n:,}" for n in lengths])
    for line, results in by_line(found).items():
        ratios = {result.case.length: result.times(peer, part) for result in results}
        if line.contender != peer and any(ratios.values()):
            table.add_row(*_names(line), *(_faster(ratios.get(length)) for length in lengths))
    return table


def memory_table(found: Sequence[Result]) -> Table:
    """Bytes per token and head at the longest length of each contender."""
    table = _table(
        "Forward and backward, bytes per token and head: kept for backward (q, k, v and the output "
        "too, where they are read again),\nand the peak beyond q, k and v; at the longest length "
        "of each contender",
        _LINE,
        ("length", "kept", "peak"),
    )
    for line, longest in _longest(found):
        taken, tokens = longest.held.bytes[longest.case], longest.case.token_heads
        sizes = (longest.case.length, taken.kept / tokens, taken.peak / tokens)
        table.add_row(*_names(line), *(f"{size:,.0f}" for size in sizes))
    return table


def left_out_table(found: Sequence[Result]) -> Table:
    """Who did not take part where, and why: contenders with one reason in one row."""
    rows: dict[tuple[str, str, str], list[Case]] = {}
    for line, results in by_line(found).items():
        missing = [result for result in results if result.left_out]
        if missing:
            # What was expected differs from length to length; the shortest says enough.
            ends = dict.fromkeys((missing[0].case.length, missing[-1].case.length))
            span = " to ".join(f"{length:,}" for length in ends)
            rows.setdefault((line.contender, span, missing[0].left_out), []).append(line)
    table = _prose("Left out", ("contender", "mode", "dtype", "m", "lengths", "reason"))
    for (contender, span, reason), lines in rows.items():
        modes = _list(line.mode for line in lines)
        dtypes = _list(line.dtype for line in lines)
        features = _list(str(line.features or "") for line in lines)
        table.add_row(contender, modes, dtypes, features, span, reason)
    return table


def machine_table(machine: Machine) -> Table:
    """The rates that the roofline is made of."""
    table = _table("This machine: the best of some repeats", ("what",), ("rate",))
    for dtype, ways in machine.products.items():
        for library, rate in ways.items():
            table.add_row(f"products, {dtype}, {library}", f"{rate / 1e9:,.0f} GFLOP/s")
    table.add_row("exponentials, fp32, in cache", f"{machine.exponentials / 1e9:.2f} G/s")
    table.add_row("copy in memory, read and written", f"{machine.bandwidth / 1e9:.1f} GB/s")
    return table


def roofline_table(found: Sequence[Result], machine: Machine) -> Table:
    """What fraction of the machine's rates a contender reaches, at its longest length."""
    table = _table(
        "Roofline, forward and backward, ms at the longest length of each contender; reached is "
        "the larger of\nproducts + exponentials and memory, over the time measured",
        _LINE,
        ("length", "products", "exponentials", "memory", "measured", "reached"),
    )
    for line, longest in _longest(found):
        work = work_of(longest.case)
        if work is not None:
            measured = longest.held.median(longest.case)
            parts = (*work.seconds(machine, line.dtype), measured)
            table.add_row(
                *_names(line),
                f"{longest.case.length:,}",
                *(f"{seconds * 1000:,.1f}" for seconds in parts),
                f"{work.least_seconds(machine, line.dtype) / measured:.0%}",
            )
    return table


def bar_table(rounds: Sequence[Round], model_memory: Verdict) -> Table:
    """The seven bars: asked, measured, met."""
    title = "Bars: d=64, H=8, B=1, m=256 where nothing else is said, forward and backward"
    table = _prose(title, ("what", "against", "asked", "measured", "met"))
    rows = [(bar.what, bar.against, bar.asked, bar.judge(rounds)) for bar in BARS]
    model = "the 36-layer paper_36 model, L=16,384, batch 1, fp32"
    asked = "fits 12 GB with activation checkpointing"
    for what, against, wanted, verdict in [*rows, (model, "peak memory", asked, model_memory)]:
        met = {True: "yes", False: "no", None: "-"}[verdict.met]
        table.add_row(what, against, wanted, verdict.measured, met)
    return table


def _prose(title: str, headings: Iterable[str]) -> Table:
    return Table(*headings, box=SIMPLE, title=title, title_justify="left", title_style="bold")


def _table(title: str, texts: Iterable[str], numbers: Iterable[str]) -> Table:
    table = _prose(title, ())
    for heading in texts:
        table.add_column(heading, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _longest(found: Sequence[Result]) -> list[tuple[Case, Result]]:
    """The longest result that was measured of each line, where there is one."""
    measured = by_line(result for result in found if result.measured)
    return [(line, results[-1]) for line, results in measured.items()]


def _names(line: Case) -> tuple[str, str, str]:
    return line.mode, line.dtype, line.label


def _list(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _faster(times: float | None) -> str:
    """How many times faster, in three digits, from how many times slower."""
    if times is None:
        return ""
    return f"{1 / times:.0f}" if times <= 0.01 else f"{1 / times:.3g}"
