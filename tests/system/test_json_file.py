"""JSON of any depth, size and type is refused in one sentence."""

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import pytest

from protlm.analysis.contact_regression import read_fit
from protlm.config.composition import read_run_config
from protlm.data.alphabet import read_alphabet
from protlm.system import json_file
from protlm.system.errors import InputDataError
from protlm.system.json_file import Count, from_json, read_json, to_json

DEEP = {
    "arrays": '{"a": ' + "[" * 30_000 + "]" * 30_000 + "}",
    "objects": '{"a": ' * 30_000 + "1" + "}" * 30_000,
    "a parser's limit": '{"a": ' + "[" * 60 + "]" * 60 + "}",
    "without an end": '{"a": ' + "[" * 30_000,
    "YAML": "- " * 30_000,
}
READERS: dict[str, Callable[[Path], object]] = {
    "x.json": lambda path: read_json(path, "a file"),
    "x.fit.json": read_fit,
    "tokenizer.json": read_alphabet,
    "config.yaml": read_run_config,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_deep_nesting_is_one_sentence(text, name, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputDataError, match=name) as caught:
        READERS[name](path)
    assert "\n" not in str(caught.value)


def test_what_is_not_an_object_of_a_moderate_size_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"a": [{"b": 1}]}')
    assert read_json(path, "a file") == {"a": [{"b": 1}]}
    with (
        mock.patch.object(json_file, "_MOST", 16),
        pytest.raises(InputDataError, match="is not JSON: it has more than 16 bytes"),
    ):
        read_json(path, "a file")
    for text in ("[1]", "null", "", "{", "9" * 5_000):
        path.write_text(text)
        with pytest.raises(InputDataError, match=r"is not (JSON|a file): "):
            read_json(path, "a file")
    path.unlink()
    for read, name in (
        (lambda path: read_json(path, "a file"), "a file"),
        (read_run_config, "the config"),
    ):
        os.mkfifo(tmp_path / name)
        with pytest.raises(InputDataError, match=f"is a pipe or a device, not {name}"):
            read(tmp_path / name)


class Color(StrEnum):
    red = "red"
    blue = "blue"


@dataclass(frozen=True)
class Part:
    number: Count
    name: Annotated[str, re.compile("[a-z]+")] | None = None


@dataclass(frozen=True)
class Whole:
    """One field of each type."""

    parts: dict[str, tuple[Part, ...]]
    color: Color
    ratio: float
    is_new: bool
    any: Any
    counts: Counter[str] = field(default_factory=Counter)
    listed: Mapping[str, list[tuple[str, int]]] = field(default_factory=dict)
    size: Annotated[int, range(3, 9)] | None = None
    derived: int = field(default=1, init=False)


WHOLE = Whole(
    {"a": (Part(3, "x"), Part(0))},
    Color.blue,
    0.5,
    True,
    [None, {"b": 1}],
    Counter(x=2),
    {"r": [("P1", 7)]},
    size=3,
)
PLAIN = {
    "parts": {"a": [{"number": 3, "name": "x"}, {"number": 0, "name": None}]},
    "color": "blue",
    "ratio": 0.5,
    "is_new": True,
    "any": [None, {"b": 1}],
    "counts": {"x": 2},
    "listed": {"r": [["P1", 7]]},
    "size": 3,
}


def test_a_value_becomes_plain_and_is_read_again():
    assert to_json(WHOLE) == PLAIN
    found = from_json(Whole, PLAIN)
    assert found == WHOLE
    assert type(found.counts) is Counter
    assert from_json(Whole, {**PLAIN, "ratio": 1, "size": None}).ratio == 1


@pytest.mark.parametrize(
    "change, message",
    [
        ({"color": "green"}, "color='green' must be one of blue, red"),
        ({"color": ["red"]}, "color=['red'] must be one of blue, red"),
        ({"ratio": float("nan")}, "ratio=nan must be a number"),
        ({"ratio": True}, "ratio=True must be a number"),
        ({"is_new": 1}, "is_new=1 must be true or false"),
        ({"size": 9}, "size=9 must be at least 3 and below 9"),
        ({"size": 2}, "size=2 must be at least 3 and below 9"),
        ({"size": "3"}, "size='3' must be a whole number"),
        ({"size": True}, "size=True must be a whole number"),
        ({"parts": []}, "parts=[] must be an object"),
        ({"parts": {3: []}}, "parts=3 must be a text"),
        ({"parts": {"a": {}}}, "parts.a={} must be a list"),
        ({"parts": {"a": [3]}}, "parts.a[0]=3 must be an object"),
        ({"parts": {"a": [{"number": -1}]}}, "parts.a[0].number=-1 must be at least 0 and below"),
        ({"parts": {"a": [{"number": 1, "name": "X"}]}}, "name='X' must be like [a-z]+"),
        ({"parts": {"a": [{"number": 1, "name": "x\n"}]}}, "name='x\\n' must be like [a-z]+"),
        ({"parts": {"a": [{}]}}, "parts.a[0].number is missing"),
        ({"counts": {"x": None}}, "counts.x=None must be a whole number"),
        ({"listed": {"r": [["P1"]]}}, "listed.r[0]=['P1'] must be a list"),
        ({"listed": {"r": [["P1", "7"]]}}, "listed.r[0][1]='7' must be a whole number"),
        ({"derived": 3}, "derived is unknown"),
        ({"_" * 99: 3}, f"{'_' * 60} is unknown"),
    ],
)
def test_what_is_of_another_type_is_named(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_json(Whole, {**PLAIN, **change})
