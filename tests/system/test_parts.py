"""Parts of interrupted work: read as they were written, or not at all."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from protlm.system.parts import new_part, read_part, write_facts

CONTENT, FACTS = bytes(range(256)) * 3, {"too large": [1, 2], "name": "wéird\n"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A part with a content and facts, of which one was added late."""
    facts = dict(list(FACTS.items())[:1])
    with new_part(tmp_path / "1.part of work", facts) as temporary:
        temporary.write_bytes(CONTENT)
        facts |= FACTS
    return tmp_path / "1.part of work"


def test_content_and_facts_are_read_as_they_were_written(path, capsys):
    part = read_part(path)
    assert (part.content.tobytes(), part.facts) == (CONTENT, FACTS)
    assert path.read_bytes().startswith(CONTENT)
    write_facts(path, {})
    part = read_part(path)
    assert (part.content.tobytes(), part.facts) == (b"", {})
    path.unlink()
    assert read_part(path) is None
    assert capsys.readouterr().err == ""


def flipped(path: Path, place: int) -> object:
    content = path.read_bytes()
    return path.write_bytes(bytes(x ^ (n == place) << n % 8 for n, x in enumerate(content)))


DAMAGES: dict[str, Callable[[Path], object]] = {
    **{f"flipped at {n}": lambda path, n=n: flipped(path, n) for n in range(0, 920, 23)},
    **{f"cut off at {n}": lambda path, n=n: os.truncate(path, n) for n in (0, 1, 64, 65, 768, 800)},
    "other JSON": lambda path: path.write_text('{"sha256": "", "facts": {}}\n' * 9),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "a folder": lambda path: path.unlink() or path.mkdir(),
    "a pipe": lambda path: path.unlink() or os.mkfifo(path),
    "a broken link": lambda path: path.unlink() or path.symlink_to("nothing"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_part_is_named_and_not_used(damage, path, capsys):
    damage(path)
    assert read_part(path) is None
    assert f"{path} is damaged or of another version, and is not used" in capsys.readouterr().err
    write_facts(path, FACTS)
    assert read_part(path) is not None


def test_a_part_is_not_taken_for_another(path, capsys):
    path.rename(path.with_name("2"))
    assert read_part(path.with_name("2")) is None
    assert "2 is damaged" in capsys.readouterr().err
