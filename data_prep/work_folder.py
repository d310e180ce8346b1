"""`OUT.partial`: the folder in which a data set grows, and from which a build resumes.

Its journal has one small file for each finished segment, written after its shards.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from protlm.data.records import Tally
from protlm.data.shards.manifest import ShardEntry, SourceEntry
from protlm.data.vocabulary import VOCABULARY
from protlm.system.errors import InputDataError
from protlm.system.json_file import from_json, to_json
from protlm.system.parts import Part, read_part, write_facts
from protlm.system.paths import check_output, sha256_of
from protlm.system.terminal import printable, watched
from protlm.system.work_folder import (
    Kind,
    WorkFolder,
    begun_with,
    read_begun,
    unfinished,
    work_folder,
)

from .sources import Place, Source

_DATA, _JOURNAL, _DIGESTS = "data", "journal", "digests"
_STATES = "sizes and times of the sources"
_NAME = "segment-{:05d}.json"
_PATTERN = re.compile(r"segment-(\d{5,})\.json")


@dataclass(frozen=True)
class Segment:
    """A finished segment, which ends at a position in the sources.

    Args:
        sources: sources before this position that no earlier segment lists.
    """

    end: Place
    sources: tuple[SourceEntry, ...]
    shards: dict[str, ShardEntry]
    tally: Tally


class Journal:
    """The finished segments of a build, in order."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)
        numbers = [int(m[1]) for path in folder.iterdir() if (m := _PATTERN.fullmatch(path.name))]
        self.segments = [
            from_json(Segment, _finished_part(folder / _NAME.format(number)).facts)
            for number in range(max(numbers, default=-1) + 1)
        ]

    def append(self, segment: Segment) -> None:
        """Writes the entry of the next segment, whose shards are complete."""
        write_facts(self._folder / _NAME.format(len(self.segments)), to_json(segment))
        self.segments.append(segment)


def _has_finished(path: Path) -> bool:
    """Returns whether a segment or share is finished, and the data set is not yet published."""
    return (path / _DATA).is_dir() and (
        any((path / _JOURNAL).glob("segment-*.json")) or any(path.glob("parts/*"))
    )


DATA_SET = Kind("data set", "being built", "--out", _has_finished, "add --restart to start over")


@dataclass(frozen=True)
class Plan:
    """Everything that the bytes of a data set depend on."""

    sources: list[Source]
    settings: dict[str, Any]
    split_rule: dict[str, Any]
    # Name and SHA-256 of the cluster table, if clusters are stored.
    clusters: tuple[str, str] | None = None

    def begun_with(self) -> dict[str, Any]:
        return begun_with(
            {
                **self.settings,
                "vocabulary": VOCABULARY.hash,
                "sources": [source.place for source in self.sources],
                "split rule": self.split_rule,
                "cluster table": self.clusters,
                _STATES: [[source.bytes, source.mtime_ns] for source in self.sources],
            }
        )


class BuildFolder:
    """The work folder of a data set."""

    def __init__(self, work: WorkFolder) -> None:
        self.path, self.lock = work.path, work.lock
        self.data, self._digests = self.path / _DATA, self.path / _DIGESTS
        self.data.mkdir(exist_ok=True)
        self.journal = Journal(self.path / _JOURNAL)
        self._sweep()

    def first_seen(self, segment: int) -> Path:
        """Returns the path of the digests of the sequences that are new in a segment."""
        return self._digests / f"first-{segment:05d}.bin"

    def read_first_seen(self, segment: int) -> np.ndarray:
        """Returns the digests of `first_seen`, uint64 [n, 2]."""
        part = _finished_part(self.first_seen(segment))
        return np.frombuffer(part.content, np.uint64).reshape(-1, 2)

    def _sweep(self) -> None:
        """Removes unfinished files of a killed build, and checks that finished shards exist."""
        segments = self.journal.segments
        shards = {entry.file: entry for segment in segments for entry in segment.shards.values()}
        for file, entry in watched("shards verified", shards.items(), quiet=not shards):
            path = self.data / file
            if not path.is_file() or sha256_of(path) != entry.sha256:
                raise _lost(path)
        kept = {
            *(self.data / file for file in shards),
            *(self.first_seen(number) for number in range(len(segments))),
        }
        for folder in (self.data, self._digests):
            for path in list(folder.rglob("*")):
                if not path.is_dir() and path not in kept:
                    path.unlink()


@contextmanager
def build_folder(
    out: Path, plan: Plan, *, restart: bool = False, break_lock: bool = False
) -> Iterator[BuildFolder]:
    """Yields the folder in which `out` is built, and renames it when the block succeeds.

    After an error, finished segments are kept, so that the same command resumes; if there are none,
    the folder is removed.
    """
    path = unfinished(out)
    if not restart and _has_finished(path):
        _refuse_changed_sources(path, plan)
    with work_folder(
        path, plan.begun_with(), DATA_SET, restart=restart, break_lock=break_lock
    ) as work:
        check_output(out)
        build = BuildFolder(work)
        if build.journal.segments:
            records = sum(segment.tally.records for segment in build.journal.segments)
            print(printable(f"resuming {path} after {records:,} records"), file=sys.stderr)
        yield build
        work.publish(build.data, out)


def _refuse_changed_sources(path: Path, plan: Plan) -> None:
    begun, now = read_begun(path, DATA_SET) or {}, plan.begun_with()
    states = begun.get(_STATES)
    if begun.get("sources") != now["sources"] or not isinstance(states, list):
        return
    for source, before, state in zip(plan.sources, states, now[_STATES], strict=False):
        if before != state:
            raise InputDataError(
                f"{source.path} has changed since {path} was begun: start over", {"restart": True}
            )


def _lost(path: Path) -> InputDataError:
    return InputDataError(
        f"{path} was finished, and is missing or damaged now: start over", {"restart": True}
    )


def _finished_part(path: Path) -> Part:
    if (part := read_part(path)) is None:
        raise _lost(path)
    return part
