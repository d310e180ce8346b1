"""The page that `benchmarks/gpu.py` writes: docs/results-gpu.md."""

import importlib.util
from collections.abc import Sequence
from typing import Any

TARGET = ("paper_36", 1024, 500_000)
# What is measured beside ours and may not be installed: the module, and the package's name.
PEERS = {"fla": "fla-core", "performer_pytorch": "performer-pytorch"}

_TRAINING = (
    *("model", "parameters", "L", "compiled", "tokens of a step", "tokens/s", "TFLOP/s"),
    *("MFU", "of the measured products", "peak memory, GB"),
)
_ATTENTION = (
    *("contender", "m", "L", "forward, ms", "forward and backward, ms", "times SDPA's time"),
    "peak, bytes for a token and head",
)


class Page:
    """Collects results and failures, and writes them as Markdown."""

    def __init__(self) -> None:
        self._device = "an unknown device"
        self._roof: float | None = None
        self._facts: list[str] = []
        self._resume = "The resume check was not made."
        self._training: list[tuple[str, ...]] = []
        self._target = f"{TARGET[0]} at L={TARGET[1]:,} was not measured."
        self._best = 0.0
        self._attention: list[str] = []

    def machine(self, results: Sequence[dict[str, Any]], failure: str) -> None:
        """Takes down what the device is."""
        if not results:
            self._facts.append(f"The device could not be measured: it {failure}.")
            return
        (found,) = results
        self._device, self._roof = found["device"], found["flops"]
        memory = "" if found["memory_gb"] is None else f", {found['memory_gb']:.0f} GB"
        self._facts.append(
            f"{self._device}{memory}, torch {found['torch']}, CUDA {found['cuda']}. Measured: "
            f"{found['flops'] / 1e12:,.3g} TFLOP/s in products of bfloat16, copies in memory at "
            f"{found['bandwidth'] / 1e9:,.0f} GB/s."
        )

    def resume(self, results: Sequence[dict[str, Any]], failure: str) -> None:
        """Takes down whether a stopped run went on exactly."""
        if not results:
            self._resume = f"The resume check {failure}."
            return
        (found,) = results
        weights, losses = found["weights_differ_by"], found["losses_differ_by"]
        of_losses = (
            f"differ by up to {losses:.1e} of themselves, the first after the stop by "
            f"{found['first_loss_differs_by']:.1e}, from"
        )
        self._resume = (
            f"A run of {found['steps']} steps, stopped by SIGTERM (exit code "
            f"{found['stopped_with']}) after step {found['stopped_after']} and continued: weights "
            f"{'equal bit for bit' if weights == 0 else f'differ by up to {weights:.1e}'}, losses "
            f"{'equal to' if losses == 0 else of_losses} those of the run that was not stopped."
        )

    def training(self, model: str, length: int, compiled: bool, found: dict[str, Any]) -> None:
        """Takes down the speed of a model at one length, or why there is none."""
        start = (model, length, "yes" if compiled else "no")
        if "failure" in found:
            blank = [""] * (len(_TRAINING) - 5)
            self._training.append((model, "", f"{length:,}", start[2], found["failure"], *blank))
            return
        rate, flops = found["tokens_per_second"], found["flops_per_second"]
        self._training.append(
            (
                model,
                f"{found['parameters'] / 1e6:.1f} M",
                f"{length:,}",
                start[2],
                f"{found['tokens_of_a_step']:,}",
                f"{rate:,.0f}",
                f"{flops / 1e12:,.3g}",
                _percent(found["mfu"]),
                _percent(flops / self._roof if self._roof else None),
                "" if found["memory_gb"] is None else f"{found['memory_gb']:.1f}",
            )
        )
        if (model, length) == TARGET[:2] and rate > self._best:
            self._best = rate
            met = "met" if rate >= TARGET[2] else "not met"
            self._target = (
                f"{model} at L={length:,}: {rate:,.0f} residues/s; {TARGET[2]:,} were asked on an "
                f"H200: {met}."
            )

    def attention(self, mode: str, rows: Sequence[dict[str, str]], failure: str) -> None:
        """Takes down the attention benchmark in one mode."""
        lines = [f"### {mode.capitalize()}", ""]
        if not rows:
            self._attention += [*lines, f"The benchmark {failure}.", ""]
            return
        lines += _table(_ATTENTION, [_attention_row(row) for row in rows if row["seconds"]])
        left_out = {row["contender"]: row["left_out"] for row in rows if row["left_out"]}
        lines += ["", *(f"- {name}: {why}" for name, why in left_out.items()), ""]
        self._attention += lines

    def text(self) -> str:
        """The page."""
        missing = [name for module, name in PEERS.items() if not importlib.util.find_spec(module)]
        lines = [
            f"# Results on {self._device}",
            "",
            "Written by `benchmarks/gpu.sh`. One device, random residues in rows without padding, "
            "`attention=performer_relu`, bf16 autocast, forward, backward, clipping and the "
            "optimiser's step; activations are kept.",
            *self._facts,
            "",
            "## Training",
            "",
            self._target,
            "",
            *_table(_TRAINING, self._training),
            "",
            "MFU is that of the maker's data sheet, where it is known; the column after it is the "
            "roofline's: the share of the rate that was measured for products of bfloat16.",
            "",
            "## Resume",
            "",
            self._resume,
            "",
            "## Attention",
            "",
            "One sequence, 8 heads of 64, bfloat16.",
            *([f"Not installed here: {', '.join(missing)}."] if missing else []),
            "",
            *(self._attention or ["Not measured.", ""]),
        ]
        return "\n".join(lines).rstrip() + "\n"


def _attention_row(row: dict[str, str]) -> tuple[str, ...]:
    times = row["times_sdpa"]
    return (
        row["contender"],
        row["features"],
        f"{int(row['length']):,}",
        f"{float(row['forward_seconds']) * 1000:.3g}",
        f"{float(row['seconds']) * 1000:.3g}",
        f"{float(times):.3g}" if times else "",
        f"{float(row['peak_bytes_per_token_head']):,.0f}",
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [titles, ["---"] * len(titles), *rows]
    return [f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in cells]
