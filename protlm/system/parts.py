"""The parts of interrupted work: files that are verified before anything continues from them.

A part is its content, of any kind, a line of JSON with its name and facts, and the SHA-256 of both.
It gets its name when it is complete.
"""

import hashlib
import json
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from protlm.system.paths import complete_file, sha256_of
from protlm.system.terminal import printable

_DIGITS = 64


class Part(NamedTuple):
    """The content of an undamaged part, which is mapped into memory, and its facts."""

    content: memoryview
    facts: dict[str, Any]


@contextmanager
def new_part(
    path: Path,
    facts: dict[str, Any] | None = None,
    *,
    overwrite: bool = True,
    check: Callable[[], object] = lambda: None,
) -> Iterator[Path]:
    """Yields a temporary path for the content; what is there may replace a part of this name.

    Facts are values of JSON, and may be added within the block. Just before the part gets its name,
    `check` may refuse.
    """
    with complete_file(path, overwrite=overwrite, check=check) as temporary:
        yield temporary
        with temporary.open("a") as file:
            print("", json.dumps([path.name, facts or {}]), sep="\n", file=file, flush=True)
            file.write(sha256_of(temporary))


def write_facts(
    path: Path,
    facts: dict[str, Any],
    *,
    overwrite: bool = True,
    check: Callable[[], object] = lambda: None,
) -> None:
    """Writes a part that has nothing but facts."""
    with new_part(path, facts, overwrite=overwrite, check=check):
        pass


def read_part(path: Path) -> Part | None:
    """Returns a part; None if it is missing, or damaged, which is said on standard error."""
    if not os.path.lexists(path):
        return None
    if path.is_file() and (end := path.stat().st_size - _DIGITS) > 0:
        with path.open("rb") as file:
            whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        start, view = whole.rfind(b"\n", 0, end - 1), memoryview(whole)
        if hashlib.sha256(view[:end]).hexdigest().encode() == view[end:]:
            name, facts = json.loads(view[start:end].tobytes())
            if name == path.name:
                return Part(view[:start], facts)
    print(printable(f"{path} is damaged or of another version, and is not used"), file=sys.stderr)
    return None
