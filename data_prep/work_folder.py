"""`OUT.partial`: where a data set grows until it is complete, and can be continued."""

import hashlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.journal import Journal, read_checked, write_checked
from data_prep.lock import BuildLock
from data_prep.sources import Source
from data_prep.wording import as_typed, difference
from protlm import __version__
from protlm.data.vocabulary import VOCABULARY
from protlm.errors import InputDataError, OutputError, UserError
from protlm.lock import LOCK
from protlm.paths import OUTPUT_FAULTS, check_output, explain_os_error, fsync

_PLAN, _DATA, _JOURNAL, _DIGESTS, _PARTS = "plan.json", "data", "journal", "digests", "parts"
_FIRST_SEEN = "first-{:05d}.bin"
# What a plan holds besides the settings, and what it is called when it is another one.
_OTHERS = {
    "protlm": "another protlm",
    "vocabulary": "another vocabulary",
    "sources": "other sources",
    "split_rule": "another split rule",
}


@dataclass(frozen=True)
class Plan:
    """What is to be built: all that the bytes of the data set depend on.

    Args:
        sources: the files, in order.
        settings: what was asked for, by the flags that ask for it.
        split_rule: the rule in words and numbers.
    """

    sources: list[Source]
    settings: dict[str, Any]
    split_rule: dict[str, Any]

    def fields(self) -> dict[str, Any]:
        """The plan as JSON holds it."""
        files = {source.place: [source.bytes, source.mtime_ns] for source in self.sources}
        return {
            "protlm": __version__,
            "vocabulary": VOCABULARY.hash,
            "sources": list(files),
            "sizes and times": list(files.values()),
            "settings": {name: _plain(value) for name, value in self.settings.items()},
            "split_rule": _plain(self.split_rule),
        }


class WorkFolder:
    """The parts of a work folder that is locked by this process.

    Args:
        path: the folder.
        lock: its lock.

    Raises:
        InputDataError: the journal is damaged.
    """

    def __init__(self, path: Path, lock: BuildLock) -> None:
        self.path, self.lock = path, lock
        self.data, self._digests = path / _DATA, path / _DIGESTS
        for folder in (self.data, self._digests):
            folder.mkdir(exist_ok=True)
        self.journal = Journal(path / _JOURNAL)
        self._sweep()

    @property
    def known_digests(self) -> Path:
        """Where the table of all digests may lie when it is large."""
        return self.path / "digests.table"

    @property
    def parts(self) -> Path:
        """Where the data sets lie of which this one is merged, if it is."""
        return self.path / _PARTS

    def first_seen(self, segment: int) -> Path:
        """Where the digests lie of the sequences that come for the first time in a segment."""
        return self._digests / _FIRST_SEEN.format(segment)

    def read_first_seen(self, segment: int) -> np.ndarray:
        """The digests of `first_seen`, uint64 [n, 2].

        Raises:
            InputDataError: the file is missing or damaged.
        """
        path = self.first_seen(segment)
        digests = path.read_bytes() if path.is_file() else b""
        expected = self.journal.segments[segment].digests_sha256
        if hashlib.sha256(digests).hexdigest() != expected:
            raise _lost(path)
        return np.frombuffer(digests, np.uint64).reshape(-1, 2)

    def _sweep(self) -> None:
        """Removes what a killed build left unfinished; a shard that is finished has to be there."""
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
    """Refuses a data set that is there, and clears what its build left if it was killed behind it.

    Raises:
        OutputError: there is such a data set.
    """
    with suppress(OSError, OutputError):
        _clear_behind(out)
    check_output(out)


def _clear_behind(out: Path) -> None:
    # This folder, or none at all, has no name to which something can be added.
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
    """Yields the folder in which `out` is built; it gets its name when the block ends well.

    On an error, what is finished stays to be continued by the same command; where nothing is, the
    folder is removed.

    Args:
        out: the data set.
        plan: what is to be built.
        restart: begins anew, whatever there is.
        break_lock: takes over the lock of another machine.

    Raises:
        UserError: something else was begun there.
        InputDataError: a source is not what it was then, or the folder is damaged.
        OutputError: another process builds there, there is no space, or no permission.
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
            print(f"continuing {path} behind {records:,} records", file=sys.stderr)
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
    return out.with_name(f"{out.name}.partial")


def _refuse_foreign(path: Path) -> None:
    """Refuses a folder that no build has made: nothing of it may be overwritten or removed."""
    names = {entry.name for entry in path.iterdir() if not entry.name.startswith(".")}
    if _PLAN not in names and names - {LOCK}:
        raise OutputError(
            f"{path} is there already and is no unfinished data set: move it away or choose "
            "another --out"
        )


def _empty(path: Path) -> None:
    # The plan goes last: as long as it is there, the rest is known to be ours.
    for entry in sorted(path.iterdir(), key=lambda entry: entry.name == _PLAN):
        if entry.name != LOCK:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)


def _begin_or_continue(path: Path, plan: Plan) -> None:
    """Writes the plan, or makes sure that it is the one that was begun."""
    wanted = plan.fields()
    if not (path / _PLAN).exists():
        write_checked(path / _PLAN, wanted)
        return
    begun = read_checked(path / _PLAN, lambda fields: {name: fields[name] for name in wanted})
    again = "type what was typed then to continue it, or add --restart to begin anew"
    for flag in {**begun["settings"], **wanted["settings"]}:
        before, now = (as_typed(flag, some["settings"].get(flag)) for some in (begun, wanted))
        if before != now:
            raise UserError(f"{path} was begun {before}, not {now}: {again}")
    for name, words in _OTHERS.items():
        if begun[name] != wanted[name]:
            told = difference(begun[name], wanted[name])
            raise UserError(f"{path} was begun with {words} ({told}): {again}")
    for source, before, now in zip(
        plan.sources, begun["sizes and times"], wanted["sizes and times"], strict=True
    ):
        if before != now:
            raise InputDataError(
                f"{source.path} has changed since {path} was begun: type the same command with "
                "--restart to begin anew"
            )


def _publish(data: Path, out: Path) -> None:
    """Gives the complete data set its name; what it holds is on the disk before."""
    for path in [*data.rglob("*"), data]:
        fsync(path)
    check_output(out)
    data.rename(out)
    fsync(out.absolute().parent)


def _leave(path: Path, lock: BuildLock) -> None:
    """Leaves what can be continued, and nothing else."""
    if not lock.is_held:
        return
    if _can_be_continued(path):
        print(f"what is finished stays in {path}", file=sys.stderr)
        lock.release()
    else:
        _remove(path, lock)


def _remove(path: Path, lock: BuildLock) -> None:
    _empty(path)
    lock.release()
    # Another process may have come for the lock.
    with suppress(OSError):
        path.rmdir()


def _can_be_continued(path: Path) -> bool:
    """Whether something is finished, and has not become the data set already."""
    if not (path / _DATA).is_dir():
        return False
    return any((path / _JOURNAL).glob("segment-*.json")) or any(path.glob(f"{_PARTS}/*"))


def _lost(path: Path) -> InputDataError:
    return InputDataError(
        f"{path} was finished, and is missing or damaged now: what was begun cannot be continued; "
        "type the same command with --restart"
    )


def _plain(value: Any) -> Any:
    """The value as JSON gives it back."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
