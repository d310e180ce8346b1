"""JSON as untrusted data: files of bounded size and depth, and values of the declared types."""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum, EnumType
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from protlm.system.errors import InputDataError, one_of
from protlm.system.paths import complete_file, existing_file

# Levels of nesting, of which those that protlm writes have a few; and bytes.
_DEEPEST, _MOST = 50, 1 << 26
_TOO_DEEP = f"it is nested more than {_DEEPEST} levels deep"
# What a value of a type is called in messages.
WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    tuple: "a list",
}
# What limits values: of numbers a range, of texts a pattern.
Count = Annotated[int, range(1 << 63)]
Sha256 = Annotated[str, re.compile(r"[0-9a-f]{64}")]
T = TypeVar("T")


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Reads a JSON file that contains an object."""
    existing_file(path, what)
    try:
        with path.open("rb") as file:
            content = file.read(_MOST + 1)
        if len(content) > _MOST:
            raise ValueError(f"it has more than {_MOST:,} bytes")
        content = json.loads(content)
    except RecursionError:
        raise InputDataError(f"{path} is not {what}: {_TOO_DEEP}") from None
    except (OSError, ValueError) as error:
        reason = str(error).split("\n", 1)[0][:100]
        raise InputDataError(f"{path} is not JSON: {reason}") from error
    if not isinstance(content, dict):
        raise InputDataError(f"{path} is not {what}: its JSON is not an object")
    level: list[Any] = [content]
    for _ in range(_DEEPEST):
        parts = (one.values() if isinstance(one, dict) else one for one in level)
        level = [one for part in parts for one in part if isinstance(one, dict | list)]
    if level:
        raise InputDataError(f"{path} is not {what}: {_TOO_DEEP}")
    return content


def write_json(path: Path, value: Any, *, indent: int = 2) -> None:
    """Writes a value as a JSON file, complete or not at all."""
    with complete_file(path) as temporary:
        temporary.write_text(json.dumps(value, indent=indent) + "\n", encoding="utf-8")


def to_json(value: Any) -> Any:
    """Returns a value of dataclasses, choices and containers as plain values of JSON."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: to_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(one) for one in value]
    if is_dataclass(value):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value) if f.init}
    return value


def from_json(kind: type[T], value: Any) -> T:
    """Returns a value of a type from what `to_json` made of it, which is not trusted.

    A part that is missing, unknown or of another type is a ValueError that says its name, what came
    and what is allowed; only a field whose default is None may be missing. Types are dataclasses,
    choices (`Enum`), bool, int, float, str, lists, tuples, dictionaries, `X | None` and `Any`;
    `Annotated[int, range(3, 9)]` or `Annotated[str, PATTERN]` limits one.
    """
    return _converted(kind, value, "")


def _converted(kind: Any, value: Any, name: str) -> Any:
    origin: Any = get_origin(kind) or kind
    parts = get_args(kind)
    if origin is Any:
        return value
    if origin in (Union, UnionType):
        return None if value is None else _converted(parts[0], value, name)
    if origin is Annotated:
        found, limit = _converted(parts[0], value, name), parts[1]
        if found in limit if isinstance(limit, range) else limit.fullmatch(found):
            return found
    elif is_dataclass(kind) and isinstance(value, dict):
        return _dataclass(kind, value, f"{name}." if name else "")
    elif origin in (dict, Mapping, Counter) and type(value) is dict:
        inner = int if origin is Counter else parts[1]
        found = {
            _converted(parts[0], key, name): _converted(inner, one, f"{name}.{key}")
            for key, one in value.items()
        }
        return Counter(found) if origin is Counter else found
    elif origin in (list, tuple) and type(value) is list:
        is_record = origin is tuple and parts[-1] is not Ellipsis
        kinds = parts if is_record else parts[:1] * len(value)
        if len(kinds) == len(value):
            items = enumerate(zip(kinds, value, strict=True))
            found = [_converted(one, x, f"{name}[{number}]") for number, (one, x) in items]
            return found if origin is list else tuple(found)
    elif origin is float and type(value) in (int, float):
        if type(value) is int or math.isfinite(value):
            return value
    elif type(value) is origin:
        return value
    for choice in _choices(origin):
        if choice.value == value:
            return choice
    raise ValueError(f"{name}={value!r:.60} must be {_allowed(origin, parts)}")


def _dataclass(kind: Any, values: dict[Any, Any], prefix: str) -> Any:
    hints, required = _fields(kind)
    if missing := [name for name in required if name not in values]:
        raise ValueError(f"{prefix}{missing[0]} is missing")
    if unknown := [name for name in values if name not in hints]:
        raise ValueError(f"{prefix}{unknown[0]!s:.60} is unknown")
    return kind(
        **{name: _converted(hints[name], one, f"{prefix}{name}") for name, one in values.items()}
    )


@cache
def _fields(kind: Any) -> tuple[dict[str, Any], list[str]]:
    """Returns the types of the fields of a dataclass, and the names of those that must be there."""
    given = [one for one in fields(kind) if one.init]
    hints = get_type_hints(kind, include_extras=True)
    return {f.name: hints[f.name] for f in given}, [f.name for f in given if f.default is not None]


def _choices(kind: Any) -> list[Any]:
    return list(kind) if isinstance(kind, EnumType) else []


def _allowed(kind: Any, parts: tuple[Any, ...]) -> str:
    if kind is Annotated and isinstance(parts[1], range):
        return f"at least {parts[1].start} and below {parts[1].stop}"
    if kind is Annotated:
        return f"like {parts[1].pattern}"
    choices = [str(one.value) for one in _choices(kind)]
    return f"one of {one_of(choices)}" if choices else WORDS.get(kind, "an object")
