"""The command line. Each command imports the heavy modules that it needs."""

import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from protlm import __version__
from protlm.cli.data import checkpoint_app, data_app, prepare
from protlm.cli.features import features_app
from protlm.cli.labels import benchmark, finetune, predict, probe
from protlm.cli.options import FRACTIONS, OUTPUT, RANGES, Device, Model, model_or_default, option
from protlm.cli.use import attention, contacts, embed, generate, inspect, score
from protlm.commands.outputs import check_figure_output
from protlm.config.fields import number_typed
from protlm.system import interruption
from protlm.system.errors import ExitCode, InputDataError, OutputError, UserError, exit_with_message
from protlm.system.paths import in_home, shipped
from protlm.system.processes import ignore_modules_of_working_folder, keep_freed_memory

app = typer.Typer(
    name="protlm",
    help="Train protein language models with linear-cost attention, embed proteins, and inspect "
    "attention.",
    epilog=f"Files that messages name, such as docs/train.md, are in {shipped('docs').parent}.",
    # Inherited by the commands.
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(data_app, name="data")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(features_app, name="features")
_SEVERAL = {
    "--include": "mean|max|std|cls|bos|per_tok|ranges",
    "--repr-layers": r"-?\d+|all",
    "--layers": r"-?\d+|all",
    "--heads": r"\d+|all",
    "--estimator": "(wt|masked|mutant)-marginals|pseudo-log-likelihood|causal-likelihood",
    "--ood-families": r"[A-Z]+\d+|[A-Za-z\d]+:[\w.]+|[^/]+ [^/]+",
    "--split": r"train|valid|test(_(iid|ood|remote)\w*)?",
    "--organism": r"\d+",
    "--lora-targets": "query|key|value|output|up|gate|down",
    "--slurm": r"[a-z_]+=.+",
    "--set": r"\w+=.+",
    "--label-columns": r"[^-].*",
    "--test-sets": r"[^-].*",
    "--splits": r"[\w.-]+=.+",
    "--tasks": r"[^-].*",
}
_MAY_BE_EMPTY = ("--prefix", "--label")
# Flags of other commands, and the settings of `protlm evaluate` that they are.
_SETTINGS = dict.fromkeys(("-m", "--model"), "checkpoint") | dict.fromkeys(OUTPUT, "output")


def _print_version(requested: bool) -> None:
    if requested:
        print(f"protlm {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Defines the options before the command."""


app.command()(prepare)


@app.command()
def train(arguments: list[str]) -> None:
    """Train a model or continue a run: protlm train [key=value ...]."""
    from protlm.config import TrainConfig
    from protlm.config.composition import OWN_FLAGS, TRAIN_FLAGS, check_arguments
    from protlm.config.settings import print_help

    # What needs no torch is checked in a moment, and names and flags without numpy.
    if {"-h", "--help"} & set(arguments):
        print_help(TrainConfig)
        return
    check_arguments(arguments, TrainConfig, TRAIN_FLAGS)
    from protlm.config.settings_file import with_file
    from protlm.training.run_config import check_run

    typed, settings = with_file([one for one in arguments if one not in OWN_FLAGS])
    if not any(one.startswith("-") for one in typed):
        check_run(typed, settings)
    # Launchers start the other ranks as `python -m MAIN_MODULE ARGUMENTS`, so the main module has
    # to be the one that trains.
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "protlm.train", *arguments])  # noqa: S606


@app.command()
def evaluate(arguments: list[str]) -> None:
    """Evaluate a model: protlm evaluate checkpoint=RUN [...]."""
    from protlm.config import EvaluateConfig
    from protlm.config.composition import compose, data_dir_of, through_hydra
    from protlm.config.settings import print_help
    from protlm.data.shards.data_set import check_splits

    def run(config: EvaluateConfig) -> None:
        check_splits(data_dir_of(config), config.split)
        # This imports torch, which takes seconds.
        from protlm.commands.evaluate import evaluate

        evaluate(config)

    rest = iter(arguments)
    typed = [f"{_SETTINGS[one]}={next(rest, '')}" if one in _SETTINGS else one for one in rest]
    if empty := {"checkpoint=", "output="} & {*typed}:
        raise UserError(f"{min(empty)} has no value; type one")
    if {"-h", "--help"} & {*typed}:
        print_help(EvaluateConfig)
    elif any(one.startswith("-") for one in typed):
        through_hydra(EvaluateConfig, typed, run)
    else:
        run(compose(EvaluateConfig, typed))


for command in (embed, attention, contacts, inspect, generate, score):
    app.command()(command)


@app.command()
def models() -> None:
    """List the models that come with protlm."""
    from protlm.commands.checkpoint import print_models

    print_models()


@app.command()
def doctor(
    fasta: Annotated[Path | None, typer.Argument(help="A sequence file to check as well.")] = None,
    model: Model = None,
    json: Annotated[bool, option("Print JSON.", "--json")] = False,
    device: Device = "auto",
) -> None:
    """Check this machine, a model and an input before a job."""
    from protlm.commands.doctor import doctor as run

    # Without a file, no model is needed.
    needed = model is not None or fasta is not None
    run(fasta, model_or_default(model) if needed else None, device=device, as_json=json)


for command in (probe, finetune, predict, benchmark):
    app.command()(command)


def main() -> NoReturn:
    """Runs the command that the arguments of this process name."""
    ignore_modules_of_working_folder()
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    # The process that trains reads it again.
    if debug and arguments[:1] != ["train"]:
        arguments.remove("--debug")
    keep_freed_memory()
    # On SIGTERM, clean up and print a message.
    with interruption.sigterm_as_interrupt():
        exit_with_message(lambda: _run(arguments), debug=debug)


def _run(arguments: list[str]) -> None:
    """Parses the arguments and runs the command; raises usage errors as `UserError`."""
    # Hydra reads the arguments of these two.
    run = {"train": train, "evaluate": evaluate}.get(arguments[0] if arguments else "")
    arguments = arguments if run else [*map(_in_home, arguments)]
    if arguments in ([], ["data"], ["checkpoint"], ["features"]):
        arguments = [*arguments, "--help"]
    # Raises an error if it was removed, where torch would end the process.
    Path.cwd()
    arguments = _checked_values(arguments)
    if run:
        run(arguments[1:])
        return
    try:
        code = app(_spread(arguments), prog_name="protlm", standalone_mode=False)
    except TyperException as error:
        message = " ".join(error.format_message().split()).rstrip(".")
        if found := re.search("path '(.*)' is not readable", message):
            kind = OutputError if "'--out" in message else InputDataError
            raise kind(f"{found[1]} cannot be read: no permission") from None
        context = getattr(error, "ctx", None)
        command = context.command_path if context else f"protlm {arguments[0]}"
        raise UserError(f"{message}; type: {command} --help") from None
    except SystemExit as end:
        # Click turns any broken pipe into exit code 1 without a message.
        if isinstance(end.__context__, BrokenPipeError):
            raise end.__context__ from None
        raise
    if code == ExitCode.INTERRUPTED:
        # Click turned Ctrl-C into this exit code without printing anything.
        raise KeyboardInterrupt
    if code:
        sys.exit(code)


def _checked_values(arguments: list[str]) -> list[str]:
    """Refuses empty arguments, which would be read as the current folder, and bad values.

    Returns the arguments, with whole numbers such as 1e3 as integers.
    """
    checked: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        flag, equals, value = argument.partition("=")
        if argument and not (equals and flag.startswith("--")):
            flag, value = before, argument
        elif not value and (name := flag or before) not in _MAY_BE_EMPTY:
            where = f"the value of {name}" if name[:1] == "-" else "an argument"
            raise UserError(f"{where} is empty, like a shell variable that is not set; type one")
        if flag == "--figure":
            check_figure_output(Path(value))
        checked.append(argument)
        # A whole number may be 2.0.
        if flag in RANGES.keys() - FRACTIONS and re.fullmatch(r"[+-]?\d*[.,]\d+(?<![.,]0)", value):
            raise UserError(f"{flag} {value} must be a whole number, typed in digits alone")
        if flag in RANGES and value:
            checked[-1] = argument.removesuffix(value) + (value := number_typed(f"{flag} ", value))
            with suppress(ValueError):
                number = int(value) if value.lstrip("+-").isdigit() else float(value)
                if number not in (allowed := RANGES[flag]):
                    raise UserError(f"{flag} {value} must be {allowed.expected(number)}")
    return checked


def _in_home(argument: str) -> str:
    """Replaces `~` where the shell does not: in `--output=~/x`, `-o~/x`, and within quotes.

    >>> _in_home("--output=runs/~x")
    '--output=runs/~x'
    """
    found = re.fullmatch(r"(--[\w-]+=|-\w)?(~.*)", argument, re.DOTALL)
    return (found[1] or "") + in_home(found[2]) if found else argument


def _spread(arguments: list[str]) -> list[str]:
    """Allows several values after one flag, as in esm-extract, with blanks or commas between them.

    >>> _spread(["--include", "mean", "per_tok", "--heads=1,2", "x.fasta"])
    ['--include', 'mean', '--include', 'per_tok', '--heads', '1', '--heads', '2', 'x.fasta']
    """
    spread: list[str] = []
    flag, fresh = "", False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name in _SEVERAL:
            flag, fresh = name, True
            spread.append(flag)
            if not equals:
                continue
        given = value if fresh and equals and name == flag else argument
        values = _values(flag, given) if flag else []
        spread += [one for value in values for one in (flag, value)][fresh:] or [given]
        flag, fresh = flag if values else "", False
    return spread


def _values(flag: str, text: str) -> list[str]:
    """Returns the values of an option that are joined by commas; none if the text is another."""
    for found in ([one.strip() for one in text.split(",") if one.strip()], [text]):
        if found and all(re.fullmatch(_SEVERAL[flag], one) for one in found):
            return found
    return []


if __name__ == "__main__":
    main()
