"""Runs what `benchmarks/gpu.sh` measures, step by step, and writes the page with the results.

Each step is a process with a time-out of its own, and all of them together have under nine minutes:
what fails, or does not come to an end, is a row of the page, and the next step begins.
"""

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_page import Page
from protlm.errors import UserError, exit_with_message
from protlm.paths import check_output, complete_file

MOST_SECONDS = 530.0
LENGTHS, QUICK_LENGTHS = (1024, 8192, 32_768), (64, 128)
MODELS, QUICK_MODELS = ("paper_36", "133M"), ("tiny",)
MODES = ("bidirectional", "causal")


@dataclass(frozen=True)
class Step:
    """A part of the measurement: what it is called, how it is run, and for how long at most."""

    label: str
    arguments: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """What a step printed, a JSON object a line, and why it did not end well; empty if it did."""

    results: list[dict[str, Any]]
    failure: str


def run(step: Step, *, seconds: float) -> Outcome:
    """Runs a step for so long at most, and ends all that it has started."""
    if seconds <= 0:
        return Outcome([], "no time was left for it")
    command = [sys.executable, "-m", *step.arguments]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors, start_new_session=True)
        try:
            process.wait(seconds)
            failure = "" if process.returncode == 0 else f"ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            failure = f"was not done after {seconds:.0f} s"
        finally:
            _end_session(process)
        out.seek(0)
        errors.seek(0)
        lines, said = out.read().splitlines(), errors.read().strip().splitlines()
    if failure and said:
        failure += f": {said[-1][:200]}"
    # A process that was killed may leave half a line.
    return Outcome([json.loads(line) for line in lines if _is_object(line)], failure)


def _end_session(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _is_object(line: str) -> bool:
    return line.startswith("{") and line.endswith("}")


def training_steps(arguments: argparse.Namespace) -> list[tuple[str, bool, Step]]:
    """Every model, as it is written first, and then compiled."""
    lengths = QUICK_LENGTHS if arguments.quick else LENGTHS
    return [
        (
            model,
            compiled,
            Step(
                f"training {model}{', compiled' if compiled else ''}",
                (
                    *("benchmarks.gpu_step", "training", "--model", model),
                    *("--lengths", *map(str, lengths), *_options(arguments)),
                    *(["--compile"] if compiled else []),
                ),
                seconds=110 if compiled else 50,
            ),
        )
        for compiled in ((False,) if arguments.quick else (False, True))
        for model in (QUICK_MODELS if arguments.quick else MODELS)
    ]


def attention_step(arguments: argparse.Namespace, mode: str, folder: Path) -> tuple[Step, Path]:
    """The attention benchmark with its peers in one mode, and the file that it writes."""
    table = folder / f"{mode}.csv"
    lengths = QUICK_LENGTHS if arguments.quick else LENGTHS
    options = (
        *("--quick", "--device", arguments.device, "--modes", mode, "--features", "64", "256"),
        *("--lengths", *map(str, lengths), "--dtypes", "bf16"),
        *("--csv", str(table), "--figure", str(folder / f"{mode}.png")),
    )
    return Step(f"attention, {mode}", ("benchmarks.attention", *options), seconds=60), table


def _options(arguments: argparse.Namespace) -> list[str]:
    return ["--device", arguments.device, *(["--quick"] if arguments.quick else [])]


class Measurement:
    """The steps of a run; the page is written anew after each, so that nothing can be lost."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._end = time.monotonic() + MOST_SECONDS
        self.page = Page()

    def measure(self) -> None:
        """Runs all steps."""
        options = _options(self._arguments)
        machine = self._run(Step("machine", ("benchmarks.gpu_step", "machine", *options), 40))
        self.page.machine(machine.results, machine.failure)
        resume = self._run(Step("resume", ("benchmarks.gpu_step", "resume", *options), 90))
        self.page.resume(resume.results, resume.failure)
        for model, compiled, step in training_steps(self._arguments):
            outcome = self._run(step)
            lengths = QUICK_LENGTHS if self._arguments.quick else LENGTHS
            measured = {found["length"]: found for found in outcome.results}
            for length in lengths:
                found = measured.get(length, {"failure": outcome.failure})
                self.page.training(model, length, compiled, found)
            self._write()
        with tempfile.TemporaryDirectory(prefix="protlm-bench-") as name:
            for mode in MODES[: 1 if self._arguments.quick else None]:
                step, table = attention_step(self._arguments, mode, Path(name))
                outcome = self._run(step)
                self.page.attention(mode, _rows(table), outcome.failure)
        self._write()

    def _run(self, step: Step) -> Outcome:
        print(f"{step.label} ...", file=sys.stderr, flush=True)
        outcome = run(step, seconds=min(step.seconds, self._end - time.monotonic()))
        if outcome.failure:
            print(f"{step.label}: {outcome.failure}", file=sys.stderr, flush=True)
        return outcome

    def _write(self) -> None:
        with complete_file(self._arguments.page, overwrite=True) as temporary:
            temporary.write_text(self.page.text())


def _rows(table: Path) -> list[dict[str, str]]:
    if not table.is_file():
        return []
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Measure all that needs a GPU.")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it work?")
    parser.add_argument("--page", type=Path, help="default on CUDA: docs/results-gpu.md")
    parsed = parser.parse_args(arguments)
    if parsed.page is None:
        is_real = parsed.device == "cuda" and not parsed.quick
        parsed.page = Path("docs" if is_real else "outputs", "results-gpu.md")
    return parsed


def main() -> None:
    """Measures, and writes the page.

    Raises:
        UserError: there is no GPU.
        OutputError: the page cannot be written.
    """
    arguments = parse()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"torch {torch.__version__} finds no GPU here; to see whether the script works, type "
            "benchmarks/gpu.sh --device cpu --quick"
        )
    check_output(arguments.page, overwrite=True)
    measurement = Measurement(arguments)
    measurement.measure()
    print(measurement.page.text())
    print(f"Wrote {arguments.page}")


if __name__ == "__main__":
    exit_with_message(main)
