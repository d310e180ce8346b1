"""This script runs the steps of `benchmarks/gpu.sh` and writes the page with the results.

Each step is a process with a timeout of its own, because a step that fails or hangs must not end
the others, and all of them together take less than nine minutes. The page reports failures too.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_page import page_text
from protlm.errors import UserError, exit_with_message
from protlm.paths import check_output, complete_file

MOST_SECONDS = 530.0
SECONDS_OF_A_LENGTH = 3.0
# On a CPU, where the script is only tested, a step may take longer by this factor.
PATIENCE_ON_A_CPU = 4
LENGTHS, QUICK_LENGTHS = (1024, 8192, 32_768), (64, 128)
MODELS, QUICK_MODELS = ("paper_36", "133M"), ("tiny",)


@dataclass(frozen=True)
class Step:
    """A step is a command with a timeout.

    Attributes:
        label: its name on the page.
        arguments: the arguments of `python -m`.
        seconds: the timeout.
        is_timed: whether it measures time, so that nothing may run beside it.
        output: the JSON file that it writes, or None if it prints lines of JSON.
    """

    label: str
    arguments: tuple[str, ...]
    seconds: float
    is_timed: bool = True
    output: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """An outcome holds the results of a step, and why it failed; empty if it did not."""

    failure: str
    results: list[dict[str, Any]] = field(default_factory=list)


def run(step: Step, *, seconds: float) -> Outcome:
    """Runs a step for at most `seconds`, and ends every process it has started."""
    if seconds <= 0:
        return Outcome("no time was left for it")
    command = [sys.executable, "-m", *step.arguments]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors, start_new_session=True)
        try:
            process.wait(seconds)
            failure = "" if process.returncode == 0 else f"ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            failure = f"did not finish within {seconds:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        errors.seek(0)
        lines, messages = out.read().splitlines(), errors.read().strip().splitlines()
    if failure and messages:
        failure += f": {messages[-1][:200]}"
    if step.output:
        lines = [step.output.read_text().replace("\n", "")] if step.output.is_file() else []
    # A process that was killed may leave half a line.
    whole = [line for line in lines if line.startswith("{") and line.endswith("}")]
    return Outcome(failure, [json.loads(line) for line in whole])


def all_steps(arguments: argparse.Namespace, folder: Path) -> list[Step]:
    """Returns the steps: machine, kernels, resume, attention in each mode, training of each model.

    Args:
        arguments: the command line.
        folder: a folder for files of the steps.
    """
    quick = ("--quick",) if arguments.quick else ()
    options = ("--device", arguments.device, *quick)
    lengths = ("--lengths", *map(str, QUICK_LENGTHS if arguments.quick else LENGTHS))
    steps = [
        Step("machine", ("benchmarks.gpu_step", "machine", *options), 40),
        Step("kernels", ("benchmarks.gpu_step", "kernels", *options), 70, is_timed=False),
        Step("resume", ("benchmarks.gpu_resume", *options), 90, is_timed=False),
    ]
    for mode in ("bidirectional",) if arguments.quick else ("bidirectional", "causal"):
        output = folder / f"{mode}.json"
        files = ("--json", str(output), "--figure", str(folder / f"{mode}.png"))
        dtype = ("--dtypes", "bf16" if arguments.device == "cuda" else "fp32")
        pace = ("--seconds", str(SECONDS_OF_A_LENGTH))
        given = ("benchmarks.attention", *options, "--modes", mode, *lengths, *dtype, *pace)
        steps.append(Step(f"attention, {mode}", (*given, *files), 80, output=output))
    for compiled in (False,) if arguments.quick else (False, True):
        for model in QUICK_MODELS if arguments.quick else MODELS:
            label = f"training {model}{', compiled' if compiled else ''}"
            given = ("benchmarks.gpu_step", "training", "--model", model, *lengths, *options)
            flag, seconds = (("--compile",), 110) if compiled else ((), 60)
            steps.append(Step(label, (*given, *flag), seconds))
    return steps


def measure(arguments: argparse.Namespace) -> str:
    """Runs all steps; writes the page anew after each, so that no result is lost."""
    patience = PATIENCE_ON_A_CPU if arguments.device == "cpu" else 1
    end, outcomes, text = time.monotonic() + patience * arguments.seconds, dict[str, Outcome](), ""

    def outcome_of(step: Step) -> Outcome:
        print(f"{step.label} ...", file=sys.stderr, flush=True)
        outcome = run(step, seconds=min(patience * step.seconds, end - time.monotonic()))
        if outcome.failure:
            print(f"{step.label}: {outcome.failure}", file=sys.stderr, flush=True)
        return outcome

    with tempfile.TemporaryDirectory(prefix="protlm-bench-") as name, ThreadPoolExecutor() as pool:
        for is_timed, group in groupby(all_steps(arguments, Path(name)), lambda x: x.is_timed):
            steps = list(group)
            found = map(outcome_of, steps) if is_timed else pool.map(outcome_of, steps)
            for step, outcome in zip(steps, found, strict=True):
                outcomes[step.label] = outcome
                text = page_text({label: (o.results, o.failure) for label, o in outcomes.items()})
                with complete_file(arguments.page, overwrite=True) as temporary:
                    temporary.write_text(text)
    return text


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Measure everything that needs a GPU.")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to test the script")
    parser.add_argument("--seconds", type=float, default=MOST_SECONDS, help="for all steps")
    parser.add_argument("--page", type=Path, help="default on CUDA: docs/results-gpu.md")
    parsed = parser.parse_args(arguments)
    if parsed.page is None:
        is_real = parsed.device == "cuda" and not parsed.quick
        parsed.page = Path("docs" if is_real else "outputs", "results-gpu.md")
    return parsed


def main() -> None:
    """Measures, and prints and writes the page.

    Raises:
        UserError: there is no GPU.
        OutputError: the page cannot be written.
    """
    arguments = parse()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"torch {torch.__version__} finds no GPU here; to test the script without one, type "
            "benchmarks/gpu.sh --device cpu --quick"
        )
    check_output(arguments.page, overwrite=True)
    print(measure(arguments))
    print(f"Wrote {arguments.page}")


if __name__ == "__main__":
    exit_with_message(main)
