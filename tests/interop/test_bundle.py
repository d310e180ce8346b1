"""Bundles: one file computes what the modules compute, and has nothing that is not used."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from protlm.interop.bundle import Bundle, Name

PACKAGE = "package_under_test"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Writes the modules of a package: `write(name="source", ...)`."""
    monkeypatch.setattr("protlm.interop.bundle._PACKAGE", PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / PACKAGE).mkdir()

    def write_modules(**sources: str) -> None:
        for name, source in {"__init__": "", **sources}.items():
            (tmp_path / PACKAGE / f"{name}.py").write_text(source)

    yield write_modules
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        del sys.modules[name]


def at(module: str, name: str) -> Name:
    return Name(f"{PACKAGE}.{module}" if module else PACKAGE, name)


def run(bundle: Bundle) -> dict[str, Any]:
    values: dict[str, Any] = {}
    assert PACKAGE not in bundle.source()
    exec(bundle.source(), values)
    return values


def test_objects_of_one_name_are_kept_apart(write: Callable[..., None]) -> None:
    write(
        first="_X = 1\n\ndef f(x=_X):\n    return x + _X\n",
        second=(
            f"from {PACKAGE}.first import f as g\n\n_X = 20\n\n"
            "class C:\n    size = _X\n    def f(self):\n        return g(), g(7), f'{_X}'\n"
        ),
    )
    bundle = Bundle([at("second", "C")], {})
    made = run(bundle)["C"]
    assert (made.size, made().f()) == (20, (2, 8, "20"))
    assert bundle.source() == bundle.source()


def test_only_what_is_used_is_included(write: Callable[..., None]) -> None:
    write(
        first="import json\nimport math\n\ndef unused():\n    return json\n\nPI = math.pi\n",
        second=(
            f"from {PACKAGE} import f\n\nclass Base:\n    pass\n\nclass C(Base):\n    value = f()\n"
        ),
        __init__=f"from {PACKAGE}.first import PI\n\ndef f():\n    return PI\n",
    )
    bundle = Bundle([at("second", "C")], {})
    assert 3.1 < run(bundle)["C"].value < 3.2
    assert "unused" not in bundle.source()
    assert "json" not in bundle.source()


def test_a_name_can_be_replaced(write: Callable[..., None]) -> None:
    write(
        first="def f():\n    return 1\n\ndef g():\n    return f()\n",
        second=(
            f"from {PACKAGE}.first import g\n\ndef other():\n    return 2\n\n"
            "def h():\n    return g()\n"
        ),
    )
    bundle = Bundle([at("second", "h")], {at("first", "f"): at("second", "other")})
    assert run(bundle)["h"]() == 2
    assert "def f(" not in bundle.source()


@pytest.mark.parametrize(
    "source, message",
    [
        ("def f():\n    import math\n    return math\n", "move the import up"),
        (f"from {PACKAGE} import first\ndef f():\n    return first._X\n", "names of .*first"),
        (
            f"from {PACKAGE}.first import _X as y\n_X = 2\ndef f(_X):\n    return y, g()\n"
            "def g():\n    return _X\n",
            "_X has two meanings",
        ),
    ],
)
def test_what_cannot_be_bundled_is_refused(
    source: str, message: str, write: Callable[..., None]
) -> None:
    write(first="_X = 1\n", second=source)
    with pytest.raises(AssertionError, match=message):
        Bundle([at("second", "f")], {}).source()
