"""`OUT.partial`: the folder in which a data set grows, and from which a build resumes."""

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from protlm import __version__
from protlm.data.vocabulary import VOCABULARY
from protlm.errors import InputDataError, OutputError, UserError
from protlm.lock import LOCK
from protlm.paths import OUTPUT_FAULTS, beside, check_output, explain_os_error, finish, fsync
from protlm.terminal import printable

from .journal import Journal, read_checked, write_checked
from .lock import BuildLock, clear_folder
from .messages import as_typed, difference
from .sources import Source

_PLAN, _DATA, _JOURNAL, _DIGESTS, _PARTS = "plan.json", "data", "journal", "digests", "parts"
_FIRST_SEEN = "first-{:05d}.bin"
# Fields of a plan besides the settings, and their wording if they differ.
_OTHERS = {
    "protlm": "another protlm",
    "vocabulary": "another vocabulary",
    "sources": "other sources",
    "split_rule": "another split rule",
    "clusters": "another cluster table",
}


@dataclass(frozen=True)
class Plan:
    """Everything that the bytes of a data set depend on.

    Args:
        sources: the files, in order.
        settings: the settings, by flag.
        split_rule: description of the split rule.
        clusters: name and SHA-256 of the cluster table, if clusters are stored.
    """

    sources: list[Source]
    settings: dict[str, Any]
    split_rule: dict[str, Any]
    clusters: tuple[str, str] | None = None

    def fields(self) -> dict[str, Any]:
        """Returns the plan as JSON values."""
        files = {source.place: [source.bytes, source.mtime_ns] for source in self.sources}
        return {
            "protlm": __version__,
            "vocabulary": VOCABULARY.hash,
            "sources": list(files),
            "sizes and times": list(files.values()),
            "settings": {name: _plain(value) for name, value in self.settings.items()},
            "split_rule": _plain(self.split_rule),
            "clusters": _plain(self.clusters),
        }


class WorkFolder:
    """A work folder that is locked by this process.

    Args:
        path: the folder.
        lock: its lock.
    """

    def __init__(self, path: Path, lock: BuildLock) -> None:
        self.path, self.lock = path, lock
        self.data, self._digests = path / _DATA, path / _DIGESTS
        self.data.mkdir(exist_ok=True)
        self.journal = Journal(path / _JOURNAL)
        self._sweep()

    @property
    def known_digests(self) -> Path:
        """Path of the table of all digests, if it is too large for memory."""
        return self.path / "digests.table"

    @property
    def clusters(self) -> Path:
        """Path of the sorted cluster table for the jobs that build the parts."""
        return self.path / "clusters.sorted"

    @property
    def parts(self) -> Path:
        """Folder of the data sets that are merged into this one, if any."""
        return self.path / _PARTS

    def first_seen(self, segment: int) -> Path:
        """Returns the path of the digests of the sequences that are new in a segment."""
        return self._digests / _FIRST_SEEN.format(segment)

    def read_first_seen(self, segment: int) -> np.ndarray:
        """Returns the digests of `first_seen`, uint64 [n, 2]."""
        path = self.first_seen(segment)
        digests = path.read_bytes() if path.is_file() else b""
        expected = self.journal.segments[segment].digests_sha256
        if hashlib.sha256(digests).hexdigest() != expected:
            raise _lost(path)
        return np.frombuffer(digests, np.uint64).reshape(-1, 2)

    def _sweep(self) -> None:
        """Removes unfinished files of a killed build, and checks that finished shards exist."""
        segments = self.journal.segments
        shards = {entry.file: entry for segment in segments for entry in segment.shards.values()}
        for file, entry in shards.items():
            path = self.data / file
            if not path.is_file() or path.stat().st_size != entry.bytes:
                raise _lost(path)
        kept = {self.data / file for file in shards}
        kept |= {self.first_seen(number) for number in range(len(segments))}
        for folder in (self.data, self._digests):
            for path in list(folder.rglob("*")):
                if path.is_file() and path not in kept:
                    path.unlink()


def refuse_finished(out: Path) -> None:
    """Rejects an existing data set, and removes the remains of its work folder."""
    with suppress(OSError, OutputError):
        _clear_remains(out)
    check_output(out)


def _clear_remains(out: Path) -> None:
    # `.` and `..` have no name to which a suffix can be added.
    if not (out.name and out.exists()):
        return
    path = _beside(out)
    if path.is_dir() and not (path / _DATA).exists():
        _refuse_foreign(path)
        _remove(path, BuildLock(path))


@contextmanager
def work_folder(
    out: Path, plan: Plan, *, restart: bool = False, break_lock: bool = False
) -> Iterator[WorkFolder]:
    """Yields the folder in which `out` is built, and renames it when the block succeeds.

    After an error, finished segments are kept, so that the same command resumes; if there are none,
    the folder is removed.

    Args:
        out: the data set.
        plan: the plan of the build.
        restart: discards an unfinished build.
        break_lock: takes over the lock of a process of another machine.
    """
    path = _beside(out)
    try:
        path.mkdir(parents=True, exist_ok=True)
        _refuse_foreign(path)
        lock = BuildLock(path, break_lock=break_lock)
    except OSError as error:
        with suppress(OSError):
            path.rmdir()
        raise explain_os_error(error, out) from error
    try:
        check_output(out)
        if restart or not _can_be_continued(path):
            _empty(path)
        _begin_or_continue(path, plan)
        work = WorkFolder(path, lock)
        if work.journal.segments:
            records = sum(segment.tally.records for segment in work.journal.segments)
            print(printable(f"resuming {path} after {records:,} records"), file=sys.stderr)
        yield work
        lock.check()
        _publish(work.data, out)
    except OSError as error:
        _leave(path, lock)
        if error.errno in OUTPUT_FAULTS:
            raise explain_os_error(error, out) from error
        raise
    except BaseException:
        _leave(path, lock)
        raise
    _remove(path, lock)


def _beside(out: Path) -> Path:
    return beside(out, ".partial")


def _refuse_foreign(path: Path) -> None:
    """Rejects a folder that no build has made, whose files must not be removed."""
    names = {entry.name for entry in path.iterdir() if not entry.name.startswith(".")}
    if _PLAN not in names and names - {LOCK}:
        raise OutputError(
            f"{path} exists already and is not an unfinished data set: move it away or choose "
            "another --out"
        )


def _empty(path: Path) -> None:
    # As long as the plan exists, everything else is known to belong to a build.
    clear_folder(path, last=_PLAN)


def _begin_or_continue(path: Path, plan: Plan) -> None:
    """Writes the plan, or checks that it is the plan of the unfinished build."""
    wanted = plan.fields()
    if not (path / _PLAN).exists():
        write_checked(path / _PLAN, wanted)
        return
    # The plan of an older protlm has no clusters.
    begun = read_checked(
        path / _PLAN, lambda fields: {name: {"clusters": None, **fields}[name] for name in wanted}
    )
    again = "use the same options as then to resume it, or add --restart to start over"
    for flag in {**begun["settings"], **wanted["settings"]}:
        before, now = (as_typed(flag, some["settings"].get(flag)) for some in (begun, wanted))
        if before != now:
            raise UserError(f"{path} was begun {before}, not {now}: {again}")
    for name, words in _OTHERS.items():
        if begun[name] != wanted[name]:
            what = difference(begun[name], wanted[name])
            raise UserError(f"{path} was begun with {words} ({what}): {again}")
    for source, before, now in zip(
        plan.sources, begun["sizes and times"], wanted["sizes and times"], strict=True
    ):
        if before != now:
            raise InputDataError(
                f"{source.path} has changed since {path} was begun: type the same command with "
                "--restart to start over"
            )


def _publish(data: Path, out: Path) -> None:
    """Renames the complete data set, after syncing its files to the disk."""
    for path in [*data.rglob("*"), data]:
        fsync(path)
    check_output(out)
    finish(data, out)
    fsync(out.absolute().parent)


def _leave(path: Path, lock: BuildLock) -> None:
    """Keeps the folder if the build can be resumed, and removes it otherwise."""
    if not lock.is_held:
        return
    if _can_be_continued(path):
        print(printable(f"finished parts are kept in {path}"), file=sys.stderr)
        lock.release()
    else:
        _remove(path, lock)


def _remove(path: Path, lock: BuildLock) -> None:
    _empty(path)
    lock.release()
    # Another process may have created a lock there.
    with suppress(OSError):
        path.rmdir()


def _can_be_continued(path: Path) -> bool:
    """Returns whether a segment or part is finished, and the data set is not yet published."""
    if not (path / _DATA).is_dir():
        return False
    return any((path / _JOURNAL).glob("segment-*.json")) or any(path.glob(f"{_PARTS}/*"))


def _lost(path: Path) -> InputDataError:
    return InputDataError(
        f"{path} was finished, and is missing or damaged now: the build cannot be resumed; "
        "type the same command with --restart"
    )


def _plain(value: Any) -> Any:
    """Returns the value as it would be read from JSON."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
