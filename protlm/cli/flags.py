"""What is typed after a command, as the fields of its options: a field declares its flag.

A flag has the name, the type, the help text and the range of its field (`protlm.config.fields`). A
field that is an options class itself brings its own flags.
"""

import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from enum import StrEnum
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from protlm.config.fields import ANYTHING, names_of, number_typed
from protlm.system.errors import UserError, did_you_mean

_NUMBERS = {int: r"[+-]?\d{1,4000}", float: r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?inf|nan"}
_TYPES = {int: "NUMBER", float: "NUMBER", Path: "PATH"}
_UNSET = ", like a shell variable that is not set; type one"
_WIDEST = 100
# The column in which the help texts of flags begin.
_INDENT = 26


@dataclass(frozen=True)
class Flag:
    """A flag of a command, or an argument without one; `several` values, or one."""

    field: Field[Any]
    kind: Any
    several: bool
    takes_none: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which it is typed, the usual one first."""
        return names_of(self.field)

    @property
    def name(self) -> str:
        """The usual name."""
        return self.names[0]

    @property
    def is_argument(self) -> bool:
        """Whether its value is typed without a name."""
        return not self.name.startswith("-")

    @property
    def is_switch(self) -> bool:
        """Whether its name has no value."""
        return self.kind is bool or (get_origin(self.kind) is not None and not self.several)

    @property
    def is_needed(self) -> bool:
        """Whether it has to be typed."""
        return self.field.default is MISSING and self.field.default_factory is MISSING

    @cached_property
    def words(self) -> str:
        """A pattern of the values that may follow the first one, or be joined to it by commas."""
        if isinstance(self.kind, type) and issubclass(self.kind, StrEnum):
            return "|".join(map(re.escape, self.kind))
        return r"-?\d+|all" if self.kind is int else self.field.metadata["words"]

    def split(self, text: str) -> list[str]:
        """Returns the values that are joined by commas; none if the text is not such values."""
        for found in ([one.strip() for one in text.split(",") if one.strip()], [text]):
            if found and all(re.fullmatch(self.words, one) for one in found):
                return found
        return []

    def value(self, typed: Sequence[str]) -> Any:
        """Reads what was typed; raises an error if it is not allowed."""
        if self.is_switch:
            read = self.field.metadata["read"]
            return imported(read) if read else not typed[-1].startswith("--no-")
        if not self.several:
            return self._read(typed[-1])
        if self.kind is int and "all" in typed:
            if len(typed) > 1:
                raise UserError(f"{self.name} all is all of them; leave the other values out")
            return None if self.takes_none else ()
        return tuple(self._read(one) for one in typed)

    def _read(self, text: str) -> Any:
        if (read := self.field.metadata["read"]) is not None:
            return (imported(read) if isinstance(read, str) else read)(text)
        if self.kind in _NUMBERS:
            return self._number(number_typed(f"{self.name} ", text))
        if issubclass(self.kind, StrEnum) and text not in [*self.kind]:
            meant = did_you_mean(text, {name: name for name in self.kind})
            raise UserError(f"{self.name} {text} is not one of {', '.join(self.kind)}{meant}")
        return self.kind(text)

    def _number(self, text: str) -> int | float:
        if not re.fullmatch(_NUMBERS[self.kind], text, re.ASCII | re.IGNORECASE):
            whole = "whole " * (self.kind is int and not self.several)
            otherwise = f"; type numbers, or {self.name} all" * self.several
            raise UserError(f"{self.name} {text} is not a {whole}number{otherwise}")
        value, allowed = self.kind(text), self.field.metadata["allowed"]
        if allowed is not None and value not in allowed:
            raise UserError(f"{self.name} {text} must be {allowed.expected(value)}")
        return value


def imported(path: str) -> Any:
    """Imports what `module:name` names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def group(options: str, *, without: Sequence[str] = (), default: Any = MISSING) -> Any:
    """Defines a field that brings the flags of an options class, `module:name`."""
    return field(default=default, metadata={"options": options, "without": without})


def flags_of(options: type, without: Sequence[str] = ()) -> Iterator[Flag]:
    """Yields the flags of an options class, and of those that it contains."""
    for one, kind, several, takes_none in _fields_of(options):
        if "names" in one.metadata and one.name not in without:
            yield Flag(one, kind, several, takes_none)
        elif is_dataclass(kind) and isinstance(kind, type):
            yield from flags_of(kind, one.metadata.get("without", without))


def _fields_of(options: type) -> Iterator[tuple[Field[Any], Any, bool, bool]]:
    """Yields fields, the type of one value, and whether there are several, or may be none."""
    hints = get_type_hints(options)
    for one in fields(options):
        annotation = hints[one.name]
        if named := one.metadata.get("options"):
            annotation = imported(named)
        members = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
        kind = next((member for member in members if member is not NoneType), None)
        several = get_origin(kind) is tuple
        yield one, get_args(kind)[0] if several else kind, several, NoneType in members


def read(command: str, options: type, words: Sequence[str]) -> Any:
    """Reads what was typed after a command into its options; raises what is wrong with it."""
    flags = {name: one for one in flags_of(options) for name in one.names}
    for one in list(flags.values()):
        # What is set by default can be turned off.
        if one.kind is bool and one.field.default is True:
            flags[one.name.replace("--", "--no-", 1)] = one
    try:
        typed = _typed(words, flags)
    except _MistakeError as mistake:
        raise UserError(f"{mistake}; type: {command} --help") from None
    for one in flags.values():
        if one.is_needed and one.name not in typed:
            raise UserError(f"{one.name} is missing; type: {command} --help")
    return _filled(options, {name: flags[name].value(some) for name, some in typed.items()})


class _MistakeError(UserError):
    """A flag that does not exist or lacks its value: the help of the command tells more."""


def _typed(words: Sequence[str], flags: Mapping[str, Flag]) -> dict[str, list[str]]:
    """Returns what was typed for each flag and argument, by its usual name.

    Several values follow one flag, as in esm-extract, with blanks or commas between them:
    `--include mean per_tok --heads=1,2 x.fasta`.
    """
    typed: dict[str, list[str]] = {}
    arguments: list[str] = []
    # A flag whose further values may follow.
    several: Flag | None = None
    rest = [*words]
    while rest:
        word = rest.pop(0)
        if word == "--":
            arguments += rest
            break
        name, equals, value = _divided(word, flags)
        if name not in flags:
            if several is not None and (more := several.split(word)):
                typed[several.name] += more
                continue
            several = None
            arguments.append(_argument(word, flags))
            continue
        one = flags[name]
        several = one if one.several and one.words else None
        if one.is_switch:
            if equals:
                raise _MistakeError(f"{name} takes no value")
            typed.setdefault(one.name, []).append(name)
            continue
        if not equals:
            if not rest or rest[0] in flags or rest[0].startswith("--"):
                raise _MistakeError(f"{name} needs a value")
            value = rest.pop(0)
        if not value and one.words != ANYTHING:
            raise UserError(f"the value of {name} is empty{_UNSET}")
        typed.setdefault(one.name, []).extend((one.several and one.split(value)) or [value])
    for one in dict.fromkeys(flags.values()):
        if one.is_argument and arguments:
            count = len(arguments) if one.several else 1
            typed[one.name], arguments = arguments[:count], arguments[count:]
    if arguments:
        raise _MistakeError(f"{arguments[0]} is an argument too many")
    return typed


def _divided(word: str, flags: Mapping[str, Flag]) -> tuple[str, str, str]:
    """Divides `--flag=value` and `-fvalue`."""
    if word[:2] in flags and len(word) > 2:
        return word[:2], "=", word[2:].removeprefix("=")
    return word.partition("=") if word.startswith("-") else (word, "", "")


def _argument(word: str, flags: Mapping[str, Flag]) -> str:
    if not word:
        raise UserError(f"an argument is empty{_UNSET}")
    if word.startswith("-") and word != "-":
        name = word.partition("=")[0]
        known = {one: one for one in flags if one.startswith("-")}
        raise _MistakeError(f"there is no {name}{did_you_mean(name, known)}")
    return word


def _filled(options: type, values: Mapping[str, Any]) -> Any:
    """Makes the options of what was typed; the others keep their defaults."""
    given: dict[str, Any] = {}
    for one, kind, *_ in _fields_of(options):
        if "names" in one.metadata:
            if (name := names_of(one)[0]) in values:
                given[one.name] = values[name]
        elif is_dataclass(kind) and isinstance(kind, type):
            is_typed = any(inner.name in values for inner in flags_of(kind))
            if is_typed or one.default is one.default_factory is MISSING:
                given[one.name] = _filled(kind, values)
    return options(**given)


def help_text(command: str, sentence: str, options: type) -> str:
    """Returns the help of a command, in the width of the terminal."""
    flags = [*flags_of(options)]
    arguments = [one for one in flags if one.is_argument]
    usage = [f"{one.name}{'...' * one.several}" for one in arguments]
    rows = [(_left(one), _about(one)) for one in flags if not one.is_argument]
    rows.append(("-h, --help", "Show this help."))
    return "\n\n".join(
        [
            f"Usage: {' '.join([command, *usage, '[FLAGS]'])}",
            wrapped(sentence),
            *([table("Arguments", [(x.name, _about(x)) for x in arguments])] if arguments else []),
            table("Flags", rows),
        ]
    )


def table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """Formats names and sentences as two columns, in the width of the terminal."""
    lines = [f"{title}:"]
    for name, text in rows:
        start = f"  {name}  "
        if len(start) > _INDENT:
            lines.append(start.rstrip())
            start = ""
        lines.append(wrapped(text, start.ljust(_INDENT), " " * _INDENT))
    return "\n".join(lines)


def wrapped(text: str, start: str = "", further: str = "") -> str:
    """Breaks a text into lines; the first one begins with `start`, the others with `further`."""
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    return textwrap.fill(
        text, width, initial_indent=start, subsequent_indent=further, break_on_hyphens=False
    )


def _left(flag: Flag) -> str:
    names = [*flag.names]
    if flag.kind is bool and flag.field.default is True:
        names.append(flag.name.replace("--", "--no-", 1))
    what = "" if flag.is_switch else f" {_TYPES.get(flag.kind, 'TEXT')}{' ...' * flag.several}"
    return f"{', '.join(names)}{what}"


def _about(flag: Flag) -> str:
    default, text = flag.field.default, flag.field.metadata["help"]
    if flag.is_needed and not flag.is_argument:
        return f"{text} [needed]"
    is_shown = default not in (MISSING, None, "", ()) and not isinstance(default, bool)
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
    return f"{text} [default: {shown}]" if is_shown else text
