"""Runs the steps of `benchmarks/gpu.sh` and writes the page with the results.

With `kernels`, these are the comparisons of the fused kernels alone, in two minutes; with `speed`,
the rates of training, attention and embedding beside their peers. A machine that is lent may take
only so much: the sizes of the tree and of its packages are checked first.

Each step is a process with its own timeout, because a step that fails or hangs must not end the
others. Together they take less than nine minutes. The page reports failures too.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import torch

from benchmarks.gpu_page import page_text
from benchmarks.harness import writable
from protlm.system.errors import UserError, exit_with_message
from protlm.system.paths import complete_file

MOST_SECONDS = {"kernels": 120.0, "speed": 500.0, "all": 530.0}
MOST_MIB = 60
SECONDS_OF_A_LENGTH = 3.0
# On a CPU, where the script is only tested, a step may take longer by this factor.
PATIENCE_ON_A_CPU = 4
LENGTHS, QUICK_LENGTHS = (1024, 8192, 32_768), (64, 128)
MODELS, QUICK_MODELS = ("5.9M", "paper_36", "133M"), ("tiny",)
FORMS = ("hybrid-6m", "hybrid-6m packed", "EsmForMaskedLM 6M", "142M")
QUICK_FORMS = FORMS[:2]


@dataclass(frozen=True)
class Step:
    """A command with a timeout.

    Attributes:
        label: its name on the page.
        arguments: the arguments of `python -m`.
        seconds: the timeout.
        is_timed: whether it measures time, and so has to run alone.
        output: the JSON file that it writes, or None if it prints lines of JSON.
    """

    label: str
    arguments: tuple[str, ...]
    seconds: float
    is_timed: bool = True
    output: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """The results of a step, and why it failed; empty if it did not."""

    failure: str
    results: list[dict[str, Any]] = field(default_factory=list)


class Running:
    """A step whose process has been started.

    Args:
        step: the step to start.
        seconds: the timeout.
    """

    def __init__(self, step: Step, *, seconds: float) -> None:
        self._step, self._seconds = step, seconds
        self._end = time.monotonic() + seconds
        # These files stay open until the process has ended.
        self._out, self._errors = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115
        command = [sys.executable, "-m", *step.arguments]
        self._process = subprocess.Popen(
            command, stdout=self._out, stderr=self._errors, start_new_session=True
        )

    def finish(self) -> Outcome:
        """Waits for the end of the process and of every process that it has started."""
        try:
            self._process.wait(max(self._end - time.monotonic(), 0))
            code = self._process.returncode
            failure = "" if code == 0 else f"ended with {code}"
        except subprocess.TimeoutExpired:
            failure = f"did not finish within {self._seconds:.0f} s"
        finally:
            self.kill()
        lines, messages = (_lines(file) for file in (self._out, self._errors))
        if failure and messages:
            failure += f": {messages[-1][:200]}"
        if output := self._step.output:
            lines = [output.read_text().replace("\n", "")] if output.is_file() else []
        # A process that was killed may leave half a line.
        whole = [line for line in lines if line.startswith("{") and line.endswith("}")]
        return Outcome(failure, [json.loads(line) for line in whole])

    def kill(self) -> None:
        """Ends all processes of the step that still run."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _lines(file: IO[str]) -> list[str]:
    file.seek(0)
    with file:
        return file.read().strip().splitlines()


def run(steps: Sequence[Step], *, end: float, patience: float) -> list[Outcome]:
    """Runs steps side by side, each for at most `patience` times its seconds.

    Args:
        steps: one step, or several that measure no time.
        end: the value of `time.monotonic` at which the last step must have ended.
        patience: the factor of all timeouts.
    """
    if time.monotonic() >= end:
        return [Outcome("no time was left for it") for _ in steps]
    running: list[Running] = []
    try:
        for step in steps:
            print(f"{step.label} ...", file=sys.stderr, flush=True)
            seconds = min(patience * step.seconds, end - time.monotonic())
            running.append(Running(step, seconds=seconds))
        return [each.finish() for each in running]
    finally:
        for each in running:
            each.kill()


def chosen_steps(arguments: argparse.Namespace, folder: Path) -> list[Step]:
    """Returns the steps of the purpose; `folder` is for their files."""
    quick = ("--quick",) if arguments.quick else ()
    options = ("--device", arguments.device, *quick)
    steps = [Step("machine", ("benchmarks.gpu_step", "machine", *options), 40)]
    if arguments.purpose == "speed":
        return [*steps, *speed_steps(options, arguments.quick)]
    steps.append(Step("kernels", ("benchmarks.gpu_step", "kernels", *options), 150, is_timed=False))
    if arguments.purpose == "kernels":
        return steps
    return [*steps, *more_steps(arguments, options, folder)]


def speed_steps(options: tuple[str, ...], quick: bool) -> Iterator[Step]:
    """Yields the steps of `speed`: graphs are compiled side by side before they are timed."""
    forms = QUICK_FORMS if quick else FORMS
    for form in forms:
        given = ("benchmarks.gpu_rates", "training", form, *options, "--warm")
        yield Step(f"compilation, {form}", given, 150, is_timed=False)
    # The attention step would wait for the checks of its kernels, which are kept.
    yield Step("kernels", ("benchmarks.gpu_step", "kernels", *options), 150, is_timed=False)
    for form in forms:
        given = ("benchmarks.gpu_rates", "training", form, *options)
        yield Step(f"rate, {form}", given, 45)
    for kind in ("attention", "embedding"):
        yield Step(f"rates, {kind}", ("benchmarks.gpu_rates", kind, *options), 60)


def more_steps(arguments: argparse.Namespace, options: tuple[str, ...], folder: Path) -> list[Step]:
    """Returns the further steps of `all`: resume, attention in each mode, training of models."""
    lengths = ("--lengths", *map(str, QUICK_LENGTHS if arguments.quick else LENGTHS))
    steps = [Step("resume", ("benchmarks.gpu_resume", *options), 90, is_timed=False)]
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


def check_room(most_mib: float) -> None:
    """Refuses a tree that, with the packages in build/peers, is larger than a machine takes."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # Without git, all that is here is taken.
    given = map(Path, done.stdout.split("\0")) if done.returncode == 0 else Path().rglob("*")
    files = {path for path in (*given, *Path("build", "peers").rglob("*")) if path.is_file()}
    sizes: dict[str, int] = {}
    for path in files:
        folder = "/".join(path.parts[:-1][:2]) or "."
        sizes[folder] = sizes.get(folder, 0) + path.stat().st_size
    total = sum(sizes.values()) / (1 << 20)
    print(f"{total:.1f} MiB of {most_mib:.0f} in files", file=sys.stderr, flush=True)
    if total > most_mib:
        largest = sorted(sizes, key=lambda folder: -sizes[folder])[:3]
        listed = ", ".join(f"{folder} {sizes[folder] / (1 << 20):.1f}" for folder in largest)
        raise UserError(
            f"the files have {total:.1f} MiB, more than {most_mib:.0f} (most in {listed}); leave "
            "some out, or type --most-mib"
        )


def measure(arguments: argparse.Namespace) -> str:
    """Runs all steps, and writes the page after each, so that no result is lost."""
    patience = PATIENCE_ON_A_CPU if arguments.device == "cpu" else 1
    seconds = arguments.seconds or MOST_SECONDS[arguments.purpose]
    end, outcomes, text = time.monotonic() + patience * seconds, dict[str, Outcome](), ""
    with tempfile.TemporaryDirectory(prefix="protlm-bench-") as name:
        for steps in _turns(chosen_steps(arguments, Path(name))):
            found = run(steps, end=end, patience=patience)
            for step, outcome in zip(steps, found, strict=True):
                if outcome.failure:
                    print(f"{step.label}: {outcome.failure}", file=sys.stderr, flush=True)
                outcomes[step.label] = outcome
            text = page_text({label: (o.results, o.failure) for label, o in outcomes.items()})
            with complete_file(arguments.page, overwrite=True) as temporary:
                temporary.write_text(text)
    return text


def _turns(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Yields each timed step alone, and the other steps between two of them together."""
    for is_timed, group in groupby(steps, lambda step: step.is_timed):
        together = list(group)
        yield from [[step] for step in together] if is_timed else [together]


def main() -> None:
    """Runs all steps, and prints the page."""
    parser = argparse.ArgumentParser(description="Measure everything that needs a GPU.")
    parser.add_argument("purpose", nargs="?", default="all", choices=tuple(MOST_SECONDS))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to test the script")
    parser.add_argument("--seconds", type=float, help="for all steps")
    parser.add_argument("--most-mib", type=float, default=MOST_MIB, help="that a machine takes")
    parser.add_argument(
        "--page", type=writable, default="outputs/results-gpu.md", help="default: %(default)s"
    )
    arguments = parser.parse_args()
    check_room(arguments.most_mib)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"torch {torch.__version__} finds no GPU here; to test the script without one, type "
            "benchmarks/gpu.sh --device cpu --quick"
        )
    print(measure(arguments))
    print(f"Wrote {arguments.page}")


if __name__ == "__main__":
    exit_with_message(main)
