"""All settings, from the metadata of the schema: what decides a run, and `--help`."""

from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from enum import Enum
from operator import attrgetter
from typing import Any, NamedTuple

from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from protlm.config import TrainConfig
from protlm.config.choices import choices
from protlm.config.composition import Config, compose
from protlm.config.fields import as_typed
from protlm.system.paths import shipped
from protlm.system.terminal import console

# The width of the help in a pipe, where its lines are wrapped.
_PIPE_WIDTH = 100
_EVALUATION = {"evaluation"}


class Setting(NamedTuple):
    """A setting: its value as it would be typed, its help text, and whether it decides a run."""

    name: str
    value: str
    help: str
    decides: bool

    @property
    def section(self) -> str:
        return self.name.rpartition(".")[0]


def settings_of(config: Any) -> Iterator[Setting]:
    """Lists the settings of a config, without the options of mechanisms and evaluations.

    >>> next(settings_of(TrainConfig("r", None, None, None, None))).name
    'run_dir'
    """
    for name, one, decides in _fields(type(config)):
        help_text = one.metadata["help"] + _allowed(one.type)
        yield Setting(name, as_typed(attrgetter(name)(config)), help_text, decides)


def may_change() -> set[str]:
    """Returns the names of the settings that may change when a run continues."""
    return {name for name, _, decides in _fields(TrainConfig) if not decides}


def used_with() -> dict[str, list[str]]:
    """Returns the settings that are used with some values of others, and these values."""
    return {
        name: one.metadata.get("used_with", "").split() for name, one, _ in _fields(TrainConfig)
    }


def _fields(schema: Any, prefix: str = "") -> Iterator[tuple[str, Field, bool]]:
    for one in fields(schema):
        if is_dataclass(one.type):
            yield from _fields(one.type, f"{prefix}{one.name}.")
        elif "help" in one.metadata:
            decides = one.metadata["decides"]
            yield prefix + one.name, one, schema._decides if decides is None else decides


def _allowed(kind: Any) -> str:
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        return ""
    return f" ({', '.join(f'`{member.value}`' for member in kind)})"


def print_help(schema: type[Config]) -> None:
    """Prints the choices and settings of `protlm train` or `protlm evaluate`."""
    is_train = schema is TrainConfig
    command = "train" if is_train else "evaluate"
    config = compose(schema, [])
    out = console(pipe_width=_PIPE_WIDTH)
    out.print(Text(f"Usage: protlm {command} [key=value ...]\n"))
    out.print(Text(f"Choices, written group=choice (files in {shipped('conf')} describe them):"))
    out.print(_rows((group, ", ".join(choices(group)), "") for group in _groups(is_train)))
    out.print(Text(f"Settings, with the values of a bare `protlm {command}`:"))
    for section in dict.fromkeys(setting.section for setting in settings_of(config)):
        out.print(_rows(s[:3] for s in settings_of(config) if s.section == section))
    out.print(
        "Flags: --config FILE reads settings from a file; --cfg job prints the composed settings;\n"
        "--multirun runs a sweep; --break-lock takes over the lock of a run that died on another\n"
        "machine; --debug shows tracebacks.\n"
        f"Examples: {shipped('docs/train.md')}"
        if is_train
        else "Flags: -m MODEL and -o FILE are checkpoint=MODEL and output=FILE; --cfg job prints\n"
        "the composed settings; --debug shows tracebacks."
    )


def _rows(rows: Any) -> Padding:
    table = Table.grid(Column(no_wrap=True), Column(), Column(), padding=(0, 2))
    for name, value, text in rows:
        table.add_row(Text(name), Text(value), Text(text))
    return Padding(table, (0, 0, 1, 2), expand=False)


def _groups(is_train: bool) -> list[str]:
    groups = {path.name for path in shipped("conf").iterdir() if path.is_dir()}
    return sorted(groups - _EVALUATION if is_train else groups & _EVALUATION)
