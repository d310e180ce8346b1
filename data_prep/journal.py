"""The journal of a build: one small file for each finished segment, written after its shards."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from protlm.data.records import Tally
from protlm.data.shards.manifest import ShardEntry, SourceEntry
from protlm.system.errors import InputDataError
from protlm.system.json_file import Sha256, from_json, to_json
from protlm.system.paths import complete_file

from .sources import Place

_NAME = "segment-{:05d}.json"
_PATTERN = re.compile(r"segment-(\d{5,})\.json")
T = TypeVar("T")


@dataclass(frozen=True)
class Segment:
    """A finished segment.

    Args:
        end: position in the sources after it.
        sources: sources before this position that no earlier segment lists.
        shards: the shard of each split.
        tally: counts of its records.
        digests_sha256: SHA-256 of the file with the digests of its sequences; None if duplicates
            are not looked for.
    """

    end: Place
    sources: tuple[SourceEntry, ...]
    shards: dict[str, ShardEntry]
    tally: Tally
    digests_sha256: Sha256 | None


class Journal:
    """The finished segments of a build, in order.

    Args:
        folder: folder of the entries, one file each.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)
        numbers = [int(m[1]) for path in folder.iterdir() if (m := _PATTERN.fullmatch(path.name))]
        self.segments = [
            read_checked(folder / _NAME.format(number), partial(from_json, Segment))
            for number in range(max(numbers, default=-1) + 1)
        ]

    def append(self, segment: Segment) -> None:
        """Writes the entry of the next segment, whose shards are complete."""
        write_checked(self._folder / _NAME.format(len(self.segments)), to_json(segment))
        self.segments.append(segment)


def write_checked(path: Path, fields: dict[str, Any]) -> None:
    """Writes JSON with its SHA-256 atomically."""
    content = {"sha256": _hash(fields), "content": fields}
    with complete_file(path) as temporary:
        temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")


def read_checked(path: Path, parse: Callable[[dict[str, Any]], T]) -> T:
    """Reads a file written by `write_checked`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["sha256"] != _hash(content["content"]):
            raise ValueError("its SHA-256 does not match")
        return parse(content["content"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputDataError(
            f"{path} is missing or damaged ({error}): the build cannot be resumed; type the same "
            "command with --restart"
        ) from error


def _hash(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
