"""The command line. Each command imports the heavy modules that it needs."""

import os
import re
import sys
from pathlib import Path
from typing import NoReturn

from protlm import __version__
from protlm.cli.commands import COMMANDS, GROUPS, MODEL_NAMES, OUTPUT_NAMES
from protlm.cli.completion import script
from protlm.cli.flags import (
    UNSET,
    advising,
    help_text,
    imported,
    read,
    refuse_kept_variable,
    table,
    wrapped,
)
from protlm.system import interruption
from protlm.system.errors import UserError, did_you_mean, exit_with_message
from protlm.system.paths import in_home, shipped
from protlm.system.processes import ignore_modules_of_working_folder, keep_freed_memory

# Flags of other commands, and the settings of `protlm evaluate` that they are.
_SETTINGS: dict[str, str] = {
    **dict.fromkeys(MODEL_NAMES, "checkpoint"),
    **dict.fromkeys(OUTPUT_NAMES, "output"),
}
_HELP = {"-h", "--help"}
_FLAGS = {
    "-h, --help": "Show this help, or that of a command.",
    "--version": "Print the version.",
    "--debug": "Show where in the code an error was raised.",
    "--completion": "bash or zsh: print the script that completes commands.",
}


def _train(arguments: list[str]) -> None:
    from protlm.config import TrainConfig
    from protlm.config.composition import OWN_FLAGS, TRAIN_FLAGS, check_arguments
    from protlm.config.settings import print_help

    # What needs no torch is checked in a moment, and names and flags without numpy.
    if _HELP & {*arguments}:
        print_help(TrainConfig)
        return
    check_arguments(arguments, TrainConfig, TRAIN_FLAGS)
    from protlm.config.settings_file import with_file
    from protlm.training.run_config import check_run

    typed, file = with_file([one for one in arguments if one not in OWN_FLAGS])
    if not any(one.startswith("-") for one in typed):
        check_run(typed, file)
    # Launchers start the other ranks as `python -m MAIN_MODULE ARGUMENTS`, so the main module has
    # to be the one that trains.
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "protlm.train", *arguments])  # noqa: S606


def _evaluate(arguments: list[str]) -> None:
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
    if _HELP & {*typed}:
        print_help(EvaluateConfig)
    elif any(one.startswith("-") for one in typed):
        through_hydra(EvaluateConfig, typed, run)
    else:
        run(compose(EvaluateConfig, typed))


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
        exit_with_message(lambda: run(arguments), debug=debug)


def run(words: list[str]) -> None:
    """Runs the command that is typed; raises what is wrong with it as `UserError`."""
    # Hydra reads the arguments of these two.
    own = {"train": _train, "evaluate": _evaluate}.get(words[0] if words else "")
    words = words if own else [*map(_in_home, words)]
    # Raises an error if it was removed, where torch would end the process.
    Path.cwd()
    if "" in (words if own else words[:1]):
        raise UserError(f"an argument is empty{UNSET}")
    if own:
        # Hydra replaces ${...} itself.
        for word in words[1:]:
            if "${" not in word:
                refuse_kept_variable(word.partition("=")[2], ", or ${oc.env:NAME}")
        own(words[1:])
        return
    named = words[:2] if words[:1] and words[0] in GROUPS else words[:1]
    name = " ".join(named)
    if name in COMMANDS:
        command = COMMANDS[name]
        rest = words[len(named) :]
        if _HELP & {*rest}:
            print(help_text(f"protlm {name}", command.sentence, command.options))
        else:
            options = command.options
            with advising(options):
                typed = read(f"protlm {name}", options, rest)
                imported(command.function)(**vars(typed))
    elif name == "--version":
        print(f"protlm {__version__}")
    elif name == "--completion":
        print(script(words[1:]))
    elif not words or named[-1] in GROUPS or named[-1] in _HELP:
        print(_overview(words[0] if words and words[0] in GROUPS else ""))
    else:
        of = f"protlm {words[0]}" if words[0] in GROUPS else "protlm"
        known = {one: one for one in (*COMMANDS, *GROUPS)}
        raise UserError(f"there is no command {name}{did_you_mean(name, known)}; type: {of} --help")


def _overview(of: str) -> str:
    """Returns the help of all commands, or of those of a group."""
    if of:
        rows = {x.split()[1]: y.sentence for x, y in COMMANDS.items() if x.startswith(f"{of} ")}
        return "\n\n".join([f"Usage: protlm {of} COMMAND ...", GROUPS[of], table("Commands", rows)])
    rows = {x: y.sentence for x, y in COMMANDS.items() if " " not in x} | GROUPS
    files = f"Files that messages name, such as docs/train.md, are in {shipped('docs').parent}."
    return "\n\n".join(
        [
            "Usage: protlm COMMAND ...",
            wrapped(
                "Train protein language models with linear-cost attention, embed proteins, and "
                "inspect attention."
            ),
            table("Commands", rows),
            table("Flags", _FLAGS),
            wrapped(files),
        ]
    )


def _in_home(argument: str) -> str:
    """Replaces `~` where the shell does not: in `--output=~/x`, `-o~/x`, and within quotes.

    >>> _in_home("--output=runs/~x")
    '--output=runs/~x'
    """
    found = re.fullmatch(r"(--[\w-]+=|-\w)?(~.*)", argument, re.DOTALL)
    return (found[1] or "") + in_home(found[2]) if found else argument


if __name__ == "__main__":
    main()
