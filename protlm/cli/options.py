"""The options that several commands share, and how their values are read."""

import os
import re
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.models import OptionInfo

from protlm.config.fields import ANY_NUMBER, above, at_least
from protlm.system.errors import UserError, did_you_mean
from protlm.system.paths import check_output, existing_file


def option(text: str, *names: str) -> OptionInfo:
    """Returns an option with its help text; without names, it is called like the argument."""
    return typer.Option(*names, help=text)


def _checked(check: Callable[[Path], object]) -> Callable[[Any], Any]:
    """Returns what checks the paths that are typed, before anything heavy is imported."""

    def checked(typed: Any) -> Any:
        for path in [typed] if isinstance(typed, Path) else typed or ():
            if path != Path("-"):
                check(path)
        return typed

    return checked


def input_files(text: str, what: str = "a sequence file", *, takes_folder: bool = False) -> Any:
    """Returns an argument of files that must exist, or folders of them."""
    check = partial(existing_file, what=what, or_folder=takes_folder)
    return typer.Argument(help=text, callback=_checked(check))


def new_output(text: str, *, takes_folder: bool = False) -> OptionInfo:
    """Returns the option of an output that must not exist, unless a folder takes several tables."""
    # That of `Path` raises an error if the name is too long.
    is_folder = os.path.isdir

    def check(path: Path) -> None:
        if not (takes_folder and is_folder(path)):
            check_output(path)

    return typer.Option(*OUTPUT, help=text, callback=_checked(check))


# The numbers that options allow, in all commands that have them.
RANGES = {
    # Commands check the values of these, or they depend on another.
    **dict.fromkeys(["--valid-fraction", "--test-fraction", "--layer"], ANY_NUMBER),
    **dict.fromkeys(["--min-length", "--temperature", "--top-p"], ANY_NUMBER),
    **dict.fromkeys(["--seed", "--min-count", "--random-weights"], at_least(0)),
    **dict.fromkeys(["--toks-per-batch", "--batch-size", "--shard-residues"], at_least(1)),
    **dict.fromkeys(["--max-length", "--top-k", "--sweeps", "--epochs", "--patience"], at_least(1)),
    **dict.fromkeys(["--lora", "--devices", "--latents", "--k"], at_least(1)),
    **dict.fromkeys(["--max-proteins", "--max-residues"], at_least(1)),
    # Those of a step of `protlm features train`.
    "--residues": at_least(2_048),
    # Fewer bound what can be in excess of their mean, and so the 95 % quantile.
    "--permutations": at_least(20),
    "--learning-rate": above(0),
    **dict.fromkeys(["--min-shared", "--cluster-identity"], above(0, at_most=1)),
    "--mask-fraction": above(0, at_most=1),
    "--max-reject-rate": at_least(0, at_most=1),
    "--workers": at_least(1, at_most=256),
    "--number": at_least(1, at_most=10**8),
    "--processes": at_least(1, at_most=1_000),
    "--first-residue": at_least(-(10**9), at_most=10**9),
}
# The others are whole numbers.
FRACTIONS = {
    *("--valid-fraction", "--test-fraction", "--temperature", "--top-p", "--learning-rate"),
    *("--min-shared", "--cluster-identity", "--mask-fraction", "--max-reject-rate"),
}
Model = Annotated[
    Path | None,
    option(
        "A run, a .ckpt file, an exported or foreign model (docs/interop.md), OWNER/MODEL of "
        "the Hugging Face Hub, or a shipped model's name; default: hybrid-6m.",
        "--model",
        "-m",
    ),
]
Layers = Annotated[list[str] | None, option("From 1; -1 is the last. Default: all.")]
Heads = Annotated[list[str] | None, option("From 1. Default: all.")]
# One output has these names in all commands.
OUTPUT = ("--output", "--out", "-o")
Output = Annotated[Path, new_output("The HDF5 file to write.")]
Device = Annotated[str, option("auto, cpu, cuda (or gpu), cuda:1, ...")]
Duplicates = Annotated[
    str,
    option(
        "Repeated identifiers: error, first (skip others), suffix (ID_2); or header: name all "
        "proteins by the whole header, not by its first word."
    ),
]
SequenceFile = Annotated[
    Path, input_files("A sequence file, plain or gzip; - reads standard input.")
]
EmbeddingDtype = Annotated[str, option("float32, float16 or bfloat16.")]
BreakLock = Annotated[
    bool,
    option(
        "Take over a lock from another machine; first make sure that no process runs there.",
        "--break-lock",
    ),
]
SlurmSettings = Annotated[
    list[str] | None, option("partition=, time=, mem_gb=, ... of a job; repeatable.")
]
Choice = TypeVar("Choice", bound=StrEnum)


def allowed_value(flag: str, value: str, *allowed: str) -> str:
    """Returns the value of an option if it is one of the allowed ones."""
    if value not in allowed:
        meant = did_you_mean(value, {name: name for name in allowed})
        raise UserError(f"{flag} {value} is not one of {', '.join(allowed)}{meant}")
    return value


def choice(flag: str, value: str, choices: type[Choice]) -> Choice:
    """Returns the member of an enumeration that was typed."""
    return choices(allowed_value(flag, value, *choices))


def numbers(flag: str, typed: list[str] | None) -> tuple[int, ...] | None:
    """Returns the numbers of layers or heads that were typed; None of none, and of `all`."""
    if not typed or typed == ["all"]:
        return None
    for one in typed:
        if not re.fullmatch(r"[+-]?\d{1,9}", one, re.ASCII):
            raise UserError(f"{flag} {one} is not a number; type numbers, or {flag} all")
    return tuple(map(int, typed))


def model_or_default(given: Path | None) -> Path:
    """Returns the model to use; without `-m` it is the shipped one, which is printed."""
    if given is not None:
        return given
    from protlm.checkpoints.format import announced_default

    return announced_default("-m MODEL")
