"""What is typed after a command, as the fields of its options: a field declares its flag.

A flag has the name, the type, the help text and the range of its field (`protlm.config.fields`). A
field that is an options class itself brings its own flags.
"""

import os
import re
import shutil
import textwrap
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
UNSET = ", like a shell variable that is not set; type one"
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
    def typed_as(self) -> tuple[str, ...]:
        """All names; what is set by default can be turned off."""
        if self.kind is bool and self.field.default is True:
            return (*self.names, f"--no-{self.name[2:]}")
        return self.names

    @property
    def is_argument(self) -> bool:
        """Whether its value is typed without a name."""
        return not self.name.startswith("-")

    @property
    def is_switch(self) -> bool:
        """Whether its name has no value."""
        return self.kind is bool or (get_origin(self.kind) is not None and not self.several)

    @property
    def is_group(self) -> bool:
        """Whether it is an options class, which brings its own flags."""
        return (
            isinstance(self.kind, type)
            and is_dataclass(self.kind)
            and "names" not in self.field.metadata
        )

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

    def values(self, name: str, equals: str, value: str) -> list[str]:
        """Returns the values that were typed with a name, or that of a switch."""
        if self.is_switch:
            if equals:
                raise _MistakeError(f"{name} takes no value")
            return [name]
        if not value and self.words != ANYTHING:
            raise UserError(f"the value of {name} is empty{UNSET}")
        return self.split(value) or [value]

    def split(self, text: str) -> list[str]:
        """Returns the values that are joined by commas; none if the text is not such values."""
        if not (self.several and text):
            return []
        divided = [part.strip() for part in text.split(",") if part.strip()]
        for values in (divided, [text]):
            if values and all(re.fullmatch(self.words, value) for value in values):
                return values
        return []

    def value(self, typed: Sequence[str]) -> Any:
        """Reads what was typed; raises an error if it is not allowed."""
        if self.is_switch:
            read = self.field.metadata["read"]
            return imported(read) if read else typed[-1] in self.names
        if not self.several:
            return self._read(typed[-1])
        if self.kind is int and "all" in typed:
            if len(typed) > 1:
                raise UserError(f"{self.name} all is all of them; leave the other values out")
            return None if self.takes_none else ()
        return tuple(self._read(one) for one in typed)

    def _read(self, text: str) -> Any:
        if self.kind is Path:
            refuse_kept_variable(text)
        if (read := self.field.metadata["read"]) is not None:
            return (imported(read) if isinstance(read, str) else read)(text)
        if self.kind in _NUMBERS:
            # A whole number has no decimal comma that could be meant.
            if self.kind is float or "," not in text:
                text = number_typed(f"{self.name} ", text)
            return self._number(text)
        if issubclass(self.kind, StrEnum) and text not in [*self.kind]:
            meant = did_you_mean(text, {name: name for name in self.kind})
            raise UserError(f"{self.name} {text} is not one of {', '.join(self.kind)}{meant}")
        return self.kind(text)

    def _number(self, text: str) -> int | float:
        if not re.fullmatch(_NUMBERS[self.kind], text, re.ASCII | re.IGNORECASE):
            expected = "a whole number" if self.kind is int else "a number"
            if self.several:
                expected = f"a number; type numbers, or {self.name} all"
            raise UserError(f"{self.name} {text} is not {expected}")
        value, allowed = self.kind(text), self.field.metadata["allowed"]
        if allowed is not None and value not in allowed:
            raise UserError(f"{self.name} {text} must be {allowed.expected(value)}")
        return value


def refuse_kept_variable(text: str, otherwise: str = "") -> None:
    """Refuses a path with a variable that the shell did not replace, unless such a file exists."""
    path = Path(text)
    for part in (path, *path.parents):
        found = re.search(r"\$\{?[A-Za-z_]\w*", part.name)
        # That of `Path` raises an error if the name is too long.
        if found and not os.path.lexists(part):
            raise UserError(
                f"{text}: the shell keeps {found[0]} in single quotes; type double ones{otherwise}"
            )


def imported(path: str) -> Any:
    """Imports what `module:name` names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def group(options: str, *, without: Sequence[str] = (), default: Any = MISSING) -> Any:
    """Defines a field that brings the flags of an options class, `module:name`."""
    return field(default=default, metadata={"options": options, "without": without})


def flags_of(options: type, without: Sequence[str] = ()) -> Iterator[Flag]:
    """Yields the flags of an options class, and of those that it contains."""
    for one in _fields_of(options):
        if "names" in one.field.metadata and one.field.name not in without:
            yield one
        elif one.is_group and one.field.name not in without:
            yield from flags_of(one.kind, one.field.metadata.get("without", without))


def _fields_of(options: type) -> Iterator[Flag]:
    """Yields the fields of an options class: flags, groups of flags, and others."""
    hints = get_type_hints(options)
    for one in fields(options):
        named = one.metadata.get("options")
        annotation = imported(named) if named else hints[one.name]
        members = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
        kind = next(member for member in members if member is not NoneType)
        several = get_origin(kind) is tuple
        yield Flag(one, get_args(kind)[0] if several else kind, several, NoneType in members)


def read(command: str, options: type, words: Sequence[str]) -> Any:
    """Reads what was typed after a command into its options; raises what is wrong with it."""
    flags = {flag.name: flag for flag in flags_of(options)}
    try:
        typed = _typed(words, [*flags.values()])
    except _MistakeError as mistake:
        raise UserError(f"{mistake}; type: {command} --help") from None
    return _filled(options, {name: flags[name].value(values) for name, values in typed.items()})


class _MistakeError(UserError):
    """A flag that does not exist or lacks its value: the help of the command tells more."""


def _typed(words: Sequence[str], known: Sequence[Flag]) -> dict[str, list[str]]:
    """Returns what was typed for each flag and argument, by its usual name.

    Several values follow one flag, as in esm-extract, with blanks or commas between them:
    `--include mean per_tok --heads=1,2 x.fasta`.
    """
    # A file may have the name of an argument.
    flags = {name: flag for flag in known if not flag.is_argument for name in flag.typed_as}
    typed = defaultdict[str, list[str]](list)
    arguments: list[str] = []
    # A flag whose further values may follow.
    several: Flag | None = None
    rest = deque(words)
    while rest:
        name, equals, value = _divided(rest.popleft(), flags)
        if name == "--":
            arguments += rest
            break
        if name in flags:
            several = flags[name]
            if not (equals or several.is_switch):
                value = _next(name, rest, flags)
            typed[several.name] += several.values(name, equals, value)
        elif several is not None and (more := several.split(name)):
            typed[several.name] += more
        else:
            several = None
            arguments.append(_argument(name, flags))
    for flag in known:
        if flag.is_argument and arguments:
            count = len(arguments) if flag.several else 1
            typed[flag.name], arguments = arguments[:count], arguments[count:]
        if flag.is_needed and flag.name not in typed:
            raise _MistakeError(f"{flag.name} is missing")
    if arguments:
        raise _MistakeError(f"{arguments[0]} is an argument too many")
    return typed


def _next(name: str, rest: "deque[str]", flags: Mapping[str, Flag]) -> str:
    """Returns the value that follows a flag; it may begin with a hyphen."""
    if not rest or rest[0] in flags or rest[0].startswith("--"):
        raise _MistakeError(f"{name} needs a value")
    return rest.popleft()


def _divided(word: str, flags: Mapping[str, Flag]) -> tuple[str, str, str]:
    """Divides `--flag=value` and `-fvalue`; another word is whole."""
    if word[:2] in flags and len(word) > 2:
        return word[:2], "=", word[2:].removeprefix("=")
    divided = word.partition("=")
    return divided if divided[0] in flags else (word, "", "")


def _argument(word: str, flags: Mapping[str, Flag]) -> str:
    if not word:
        raise UserError(f"an argument is empty{UNSET}")
    if word.startswith("-") and word != "-":
        name = word.partition("=")[0]
        raise _MistakeError(f"there is no {name}{did_you_mean(name, {one: one for one in flags})}")
    return word


def _filled(options: type, values: Mapping[str, Any]) -> Any:
    """Makes the options of what was typed; the others keep their defaults."""
    filled: dict[str, Any] = {}
    for flag in _fields_of(options):
        if flag.is_group:
            if flag.is_needed or any(inner.name in values for inner in flags_of(flag.kind)):
                filled[flag.field.name] = _filled(flag.kind, values)
        elif flag.name in values:
            filled[flag.field.name] = values[flag.name]
    return options(**filled)


@contextmanager
def advising(options: type) -> Iterator[None]:
    """Adds what to type to an error in its block that names options of a command."""
    try:
        yield
    except UserError as error:
        if advice := _advice(error.options, options):
            error.args = (f"{error}; {advice}",)
        raise


def _advice(mending: Mapping[str, object], options: type) -> str:
    """Returns how the options are typed that help; "" if the command has none of them."""
    names = {one.field.name: one.name for one in flags_of(options)} if mending else {}
    known = [(names[option], value) for option, value in mending.items() if option in names]
    left_out = [name for name, value in known if value is None]
    typed = [
        name if value is True else f"{name} {value}" for name, value in known if value is not None
    ]
    parts = [f"type {' or '.join(typed)}"] if typed else []
    parts += [f"leave {' and '.join(left_out)} out"] if left_out else []
    return ", or ".join(parts)


def help_text(command: str, sentence: str, options: type) -> str:
    """Returns the help of a command, in the width of the terminal."""
    flags = [*flags_of(options)]
    arguments = {_left(one): _about(one) for one in flags if one.is_argument}
    named = {_left(one): _about(one) for one in flags if not one.is_argument}
    parts = [f"Usage: {' '.join([command, *arguments, '[FLAGS]'])}", wrapped(sentence)]
    parts += [table("Arguments", arguments)] if arguments else []
    return "\n\n".join([*parts, table("Flags", {**named, "-h, --help": "Show this help."})])


def table(title: str, rows: Mapping[str, str]) -> str:
    """Formats names and sentences as two columns, in the width of the terminal."""
    lines = [f"{title}:"]
    for name, text in rows.items():
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
    """Returns what is typed: an argument, or the names of a flag and the kind of its values."""
    names = ", ".join(flag.typed_as)
    if flag.is_argument:
        return f"{names}..." if flag.several else names
    if flag.is_switch:
        return names
    return f"{names} {_TYPES.get(flag.kind, 'TEXT')}{' ...' if flag.several else ''}"


def _about(flag: Flag) -> str:
    default, text = flag.field.default, flag.field.metadata["help"]
    if flag.is_needed and not flag.is_argument:
        return f"{text} [needed]"
    is_shown = default not in (MISSING, None, "", ()) and not isinstance(default, bool)
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
    return f"{text} [default: {shown}]" if is_shown else text
