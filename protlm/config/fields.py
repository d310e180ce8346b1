"""Fields of settings: default, help text and allowed range in one place; types of options.

Numbers of settings and of flags are read as they are typed.
"""

import importlib
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from protlm.system.errors import OptionError, UserError
from protlm.system.json_file import WORDS

_TYPE_NAMES = WORDS | {dict: "a group of settings", Sequence: "a list", type(None): "null"}
T = TypeVar("T")
# The words of a flag whose value may be any text, even an empty one.
ANYTHING = "(?s).*"
# Where integers of 64 bits end; no number of things is as large.
_LARGEST = 2**63


@dataclass(frozen=True)
class Range:
    """The numbers, or the names, that a setting allows.

    >>> 0 in at_least(0, below=1), 1 in at_least(0, below=1), str(at_least(0, below=1))
    (True, False, 'at least 0 and below 1')
    """

    text: str
    allows: Callable[[float], bool]

    def __contains__(self, value: float) -> bool:
        return not _is_too_large(value) and self.allows(value)

    def expected(self, value: float) -> str:
        """Returns what a value that is not in the range should be."""
        return "below 2^63" if _is_too_large(value) else self.text

    def __str__(self) -> str:
        return self.text


ANY_NUMBER = Range("a number", lambda _: True)


def _is_too_large(value: float) -> bool:
    return abs(value) >= _LARGEST if isinstance(value, int) else value in (math.inf, -math.inf)


def at_least(low: float, *, below: float | None = None, at_most: float | None = None) -> Range:
    """Returns the range [low, ∞), [low, below) or [low, at_most]."""
    if below is not None:
        return Range(f"at least {low} and below {below}", lambda value: low <= value < below)
    if at_most is not None:
        return Range(f"at least {low} and at most {at_most}", lambda v: low <= v <= at_most)
    return Range(f"at least {low}", lambda value: value >= low)


def above(low: float, *, at_most: float | None = None) -> Range:
    """Returns the range (low, ∞) or (low, at_most]."""
    if at_most is not None:
        return Range(f"above {low} and at most {at_most}", lambda value: low < value <= at_most)
    return Range(f"above {low}", lambda value: value > low)


def setting(
    help: str,
    default: Any = MISSING,
    *,
    allowed: Range | None = None,
    decides: bool | None = None,
    used_with: str = "",
) -> Any:
    """Defines a setting: the sentence of docs/settings.md and `--help`, and the allowed numbers.

    Args:
        decides: whether it decides what a run learns, and cannot change when the run continues;
            None: as its section.
        used_with: the values of another setting with which this one has an effect, such as
            `schedule.name=cosine,wsd`; of several settings, with blanks between.
    """
    metadata = {"help": help, "allowed": allowed, "decides": decides, "used_with": used_with}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def flag(
    help: str,
    default: Any = MISSING,
    *names: str,
    allowed: Range | None = None,
    needs: str = "",
    excludes: Sequence[str] = (),
    words: str = "",
    read: Callable[[str], Any] | str | None = None,
) -> Any:
    """Defines an option of a command: its default, its flag, and what is allowed beside it.

    Args:
        default: the value, or a function that returns it; what has none has to be typed.
        names: of the flag, or of the argument if it has no hyphens; `--name-of-field` otherwise.
        needs: another flag that has to be typed, too, such as `--lora RANK` or `--format hf`.
        excludes: the fields of flags that cannot be typed beside this one.
        words: a pattern of values that may follow the first one, or are joined to it by commas.
        read: makes the value of a text, of types that are not numbers, paths or enumerations;
            `module:function` is imported when it is needed.
    """
    metadata = {
        "help": help,
        "names": names,
        "allowed": allowed,
        "needs": needs,
        "excludes": excludes,
        "words": words,
        "read": read,
    }
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def names_of(option: Field[Any]) -> tuple[str, ...]:
    """Returns the names by which an option is typed."""
    return option.metadata.get("names") or (f"--{option.name.replace('_', '-')}",)


def by_flag(options: "Checked") -> dict[str, Any]:
    """Returns the values of options by the names of their flags, without those of groups."""
    flags = (one for one in fields(options) if "names" in one.metadata)  # pyright: ignore[reportArgumentType]
    return {names_of(one)[0]: getattr(options, one.name) for one in flags}


class Checked:
    """Settings whose numbers are compared with their allowed ranges when they are created.

    Flags are compared with those that they need or exclude as well.
    """

    _section = ""
    # Whether its settings decide what a run learns.
    _decides = True

    def __post_init__(self) -> None:
        for one in fields(self):  # pyright: ignore[reportArgumentType]
            allowed, value = one.metadata.get("allowed"), getattr(self, one.name)
            if allowed is not None and value is not None and value not in allowed:
                name, expected = f"{self._section}{one.name}", allowed.expected(value)
                raise UserError(f"{name}={value} must be {expected}")
            if value != one.default and "names" in one.metadata:
                self._check_others(one, value)

    def _check_others(self, option: Field[Any], value: Any) -> None:
        """Refuses an option without the one that it needs, or beside those that it excludes."""
        others: list[Field[Any]] = list(fields(self))  # pyright: ignore[reportArgumentType]
        excluded = [
            names_of(one)[0]
            for one in others
            if one.name in option.metadata["excludes"] and getattr(self, one.name) != one.default
        ]
        name = names_of(option)[0]
        if excluded:
            named = " and ".join([name, *excluded])
            raise UserError(f"{named} exclude each other; omit one of them")
        if not (needs := option.metadata["needs"]):
            return
        needed, _, word = needs.partition(" ")
        other = next(one for one in others if needed in names_of(one))
        found = getattr(self, other.name)
        # A word in capitals stands for any value.
        if not (found == word if word.islower() else found != other.default):
            shown = " ".join(value) if isinstance(value, tuple) else value
            typed = name if value is True else f"{name} {shown}"
            raise UserError(f"{typed} needs {needs}")


def number_typed(name: str, text: str, otherwise: str = "") -> str:
    """Returns a value that may be a number, whole ones as integers; refuses a decimal comma.

    >>> [number_typed("--epochs ", text) for text in ("1e3", "2.0", "1e-3", "auto")]
    ['1000', '2', '1e-3', 'auto']
    """
    if found := re.fullmatch(r"([+-]?[0-9]*),([0-9]+)((?:[eE][+-]?[0-9]+)?)", text):
        meant = f"{found[1] or 0}.{found[2]}{found[3]}"
        meant += f" or {found[1]}{found[2]}" if len(found[2]) == 3 and found[1] else ""
        raise UserError(f"{name}{text} has a comma for a point; write {meant}{otherwise}")
    # Names may be digits alone.
    is_number = re.fullmatch(r"[+-]?[0-9]{1,15}(?=[.eE])(?:\.[0-9]*)?(?:[eE]\+?[0-9]{1,2})?", text)
    is_whole = is_number and abs(float(text)) < 2**53 and float(text).is_integer()
    return f"{float(text):.0f}" if is_whole else text


def classes_in(module: str, base: type[T]) -> list[type[T]]:
    """Returns the subclasses that a module defines, without abstract ones."""
    classes = inspect.getmembers(importlib.import_module(module), inspect.isclass)
    return [
        one
        for _, one in classes
        if issubclass(one, base) and one.__module__ == module and not inspect.isabstract(one)
    ]


def check_types(kind: type, options: Mapping[str, Any]) -> None:
    """Compares options with the types of a constructor's parameters, as far as these are plain."""
    annotations = get_type_hints(kind.__init__)
    for option, value in options.items():
        annotation = annotations[option]
        members = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
        types = [get_origin(member) or member for member in members]
        # An int is accepted as a float, but a bool is neither.
        fits = type(value) in types or (type(value) is int and float in types)
        fits |= Sequence in types and isinstance(value, list | tuple)
        if not fits and all(one in _TYPE_NAMES for one in types):
            given = "null" if value is None else value
            allowed = " or ".join(_TYPE_NAMES[one] for one in types)
            raise OptionError(f"{option}={given} must be {allowed}")


def as_typed(value: Any) -> str:
    """Returns a value as it is typed after `model.NAME=`, which Hydra reads without quotes."""
    return json.dumps(value).replace('"', "")
