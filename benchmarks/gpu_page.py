"""Writes the page of `benchmarks/gpu.py` from its results."""

from collections.abc import Mapping, Sequence
from typing import Any

from studies.tables import markdown

# The results of a step and the reason for its failure.
Found = tuple[list[dict[str, Any]], str]

_INTRODUCTION = (
    "Written by `benchmarks/gpu.sh`. Training: random residues in rows without padding, mixed "
    "precision, forward, backward, clipping and the optimizer's step; activations are kept. "
    "`performer_relu` and its peer `softmax`, PyTorch's exact attention, are otherwise equal "
    "models and take turns."
)
_KERNELS = ("kernel", "causal", "values", "channels", "features", "outputs and gradients")
_TRAINING = (
    *("model", "attention", "parameters", "L", "tokens of a step", "tokens/s"),
    *("times as fast as softmax", "TFLOP/s", "MFU", "of the measured products", "peak, GB"),
)
# The titles of rates, and how the labels of their steps begin.
_RATES = {
    "Compilation": "compilation, ",
    "Training steps, tokens a second": "rate, ",
    "Attention, a pass": "rates, attention",
    "Mean vectors": "rates, embedding",
}
_ATTENTION = ("contender", "L", "ms", "times as fast as SDPA", "peak bytes")


def page_text(found: Mapping[str, Found]) -> str:
    """Returns the page in Markdown.

    Args:
        found: the results of each step, by its label.
    """
    results, failure = found["machine"]
    machine = results[0] if results else {}
    lines = [
        f"# Results on {machine.get('processor', 'an unknown device')}",
        *("", _INTRODUCTION, "", _machine_line(machine, failure)),
    ]
    if "kernels" in found:
        lines += ["", "## Fused kernels", "", *_kernel_lines(*found["kernels"])]
    if "resume" in found:
        lines += ["", "## Resume", "", _resume_line(*found["resume"])]
    for title, prefix in _RATES.items():
        own = {label: one for label, one in found.items() if label.startswith(prefix)}
        rows = [row for results, _ in own.values() for row in results]
        names = list(dict.fromkeys(name for row in rows for name in row))
        cells = [[_cell(row.get(name)) for name in names] for row in rows]
        notes = [f"- {label}: {why}" for label, (_, why) in own.items() if why]
        if rows or notes:
            lines += ["", f"## {title}", "", markdown([names, *cells]) if rows else "", "", *notes]
    for label, (results, failure) in found.items():
        if label.startswith("training "):
            model = label.removeprefix("training ")
            lines += ["", f"## T{label[1:]}", ""]
            lines += _training_lines(model, results, failure, machine.get("flops"))
        if label.startswith("attention"):
            lines += ["", f"## A{label[1:]}", "", *_attention_lines(results, failure)]
    return "\n".join(lines).rstrip() + "\n"


def _machine_line(machine: Mapping[str, Any], failure: str) -> str:
    if not machine:
        return f"The device was not measured: the step {failure}."
    memory = machine["memory_gb"]
    return (
        f"{machine['processor']}{f', {memory:.0f} GB' if memory else ''}, torch "
        f"{machine['torch']}, CUDA {machine['cuda']}, {machine['date']}. Measured: "
        f"{machine['flops'] / 1e12:,.3g} TFLOP/s in products of {machine['products']}, "
        f"copies in memory at {machine['bandwidth'] / 1e9:,.0f} GB/s."
    )


def _kernel_lines(results: Sequence[Mapping[str, Any]], failure: str) -> list[str]:
    rows = [
        (
            *(each["kernel"], "yes" if each["causal"] else "no", each["values"]),
            *(each["channels"], each["features"]),
            each["failure"] or "agrees",
        )
        for each in results
    ]
    notes = [f"The step {failure}."] if failure else []
    return ["Compared with PyTorch in float64.", "", markdown([_KERNELS, *rows]), *notes]


def _resume_line(results: Sequence[Mapping[str, Any]], failure: str) -> str:
    if not results:
        return f"The step {failure}."
    (found,) = results
    weights, losses = found["weights_differ_by"], found["losses_differ_by"]
    first = found["first_loss_differs_by"]
    of_weights = "are equal bit for bit" if weights == 0 else f"differ by up to {weights:.1e}"
    of_losses = (
        "are equal"
        if losses == 0
        else f"differ by up to {losses:.1e} of themselves, the first after the stop by {first:.1e}"
    )
    return (
        f"A run of {found['steps']} steps was stopped by SIGTERM (exit code "
        f"{found['stopped_with']}) after step {found['stopped_after']} and continued. Compared "
        f"with a run that was not stopped, weights {of_weights}, and losses {of_losses}."
    )


def _training_lines(
    model: str, results: Sequence[Mapping[str, Any]], failure: str, roof: float | None
) -> list[str]:
    rows, notes = [], [f"The step {failure}."] if failure else []
    for found in results:
        length = f"{found['length']:,}"
        if "failure" in found:
            notes.append(f"L={length}: {found['failure']}")
            continue
        notes += [f"L={length}, {name}: {why}" for name, why in found["failures"].items()]
        for name, each in found.items():
            if not isinstance(each, dict) or name == "failures":
                continue
            flops = each["flops_per_second"]
            rows.append(
                (
                    *(model, name, f"{each['parameters'] / 1e6:.1f} M", length),
                    *(f"{found['tokens_of_a_step']:,}", f"{each['tokens_per_second']:,.0f}"),
                    *(each["times_as_fast_as_softmax"] or "", f"{flops / 1e12:,.3g}"),
                    *(_percent(each["mfu"]), _percent(flops / roof if roof else None)),
                    "" if each["memory_gb"] is None else f"{each['memory_gb']:.1f}",
                )
            )
    return [markdown([_TRAINING, *rows]), *("", *notes)]


def _attention_lines(results: Sequence[Mapping[str, Any]], failure: str) -> list[str]:
    lines = [f"The step {failure}."] if failure else []
    for group, held in (results[0]["groups"] if results else {}).items():
        rows = []
        for each in held:
            speeds = each["times_as_fast_as"].get("SDPA", {})
            for name, seconds in each["medians"].items():
                speed = f"{speeds[name]['median']:.3g}" if name in speeds else ""
                peak = f"{each['facts'][name]['peak_bytes']:,.0f}"
                length = each["work"].removeprefix("L=")
                rows.append((name, length, f"{seconds * 1000:.3g}", speed, peak))
        left_out = dict(pair for each in reversed(held) for pair in each["left_out"].items())
        lines += [f"One sequence, 8 heads of 64, {group}.", "", markdown([_ATTENTION, *rows]), ""]
        lines += [f"- {name}: {why}" for name, why in left_out.items()]
    return lines


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
