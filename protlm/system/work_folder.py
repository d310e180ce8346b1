"""A folder in which a result grows, and from which an interrupted command continues."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from protlm import __version__
from protlm.system.errors import InputDataError, OutputError, UserError
from protlm.system.lock import LOCK, FolderLock, remove_locks_of_killed
from protlm.system.parts import read_part, write_facts
from protlm.system.paths import (
    OUTPUT_FAULTS,
    beside,
    check_output,
    explain_os_error,
    failures_explained,
    finish,
    sha256_of,
)
from protlm.system.terminal import printable

# What the work was begun with. As long as this file exists, all others are known to be of the work.
BEGUN = "begun_with.json"
_SUFFIX = ".partial"
# A hash, and as much of it as is worth reading.
_HASH = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{20,}\b")


def _has_parts(path: Path) -> bool:
    """Returns whether a folder has more than the lock and what the work was begun with."""
    return not all(entry.name in (BEGUN, LOCK) or _is_free(entry) for entry in path.iterdir())


def _is_free(path: Path) -> bool:
    """Returns whether this is hidden, or a folder with nothing but a lock, as that of a share."""
    is_hidden = path.name.startswith(".")
    return is_hidden or (path.is_dir() and {one.name for one in path.glob("*")} <= {LOCK})


@dataclass(frozen=True)
class Kind:
    """A kind of work folders, with its words, such as "data set", "being built" and "--out".

    Args:
        has_finished: returns whether a folder has parts that need not be made again; without any
            it is removed after an error. The default is whether it has files of the work.
        start_over: how to discard the parts; "" where the folder is removed by hand.
    """

    what: str
    doing: str
    option: str
    has_finished: Callable[[Path], bool] = _has_parts
    start_over: str = ""

    def advice(self, folder: Path) -> str:
        return self.start_over or f"remove {folder} to start over"


def _refuse_special_files(folder: Path, kind: Kind, *, restart: bool) -> None:
    """Refuses pipes, sockets, devices and broken links, for which a process may wait forever.

    Work that needs the file has to start over, which removes it.
    """
    for path in folder.rglob("*"):
        # Skips what another process has removed meanwhile.
        is_special = not path.is_file() and not path.is_dir() and os.path.lexists(path)
        if is_special and (path.suffix == ".part" or not path.name.startswith(".")):
            is_needed = path.name == BEGUN or (kind.start_over and path.name != LOCK)
            if not (is_needed and restart):
                advice = kind.advice(folder) if is_needed else "remove it"
                raise OutputError(f"{path} is neither a file nor a folder: {advice}")


class WorkFolder:
    """A work folder, in which this process may write.

    A finished part is a file that is complete when it has its name; the lock is to be checked
    before. A quiet folder, as before the work has begun, says nothing when finished parts are kept
    after an error; that of a published result is removed at the end.
    """

    def __init__(
        self, path: Path, kind: Kind, *, share: str, break_lock: bool, restart: bool
    ) -> None:
        if not os.path.lexists(path / BEGUN) and _has_parts(path):
            raise OutputError(
                f"{path} exists already and is not an unfinished {kind.what}: move it away or "
                f"choose another {kind.option}"
            )
        _refuse_special_files(path, kind, restart=restart)
        self.path, self.is_quiet, self.is_published = path, True, False
        self._kind, self._break_lock, self._locked = kind, break_lock, path / share
        self._locked.mkdir(exist_ok=True)
        self.lock = FolderLock(self._locked, kind.doing, kind.option, break_lock=break_lock)

    def publish(self, made: Path, out: Path) -> None:
        """Gives a complete file or folder its final name; the rest is removed at the end."""
        self.check()
        finish(made, out)
        self.is_published = True

    def check(self) -> None:
        """Makes sure, before the result gets its final name, that it is only made here."""
        self.lock.check()
        self.refuse_others()

    def refuse_others(self) -> None:
        """Makes sure that no other process computes a share, and removes the locks of dead ones."""
        doing, option = self._kind.doing, self._kind.option
        for folder in self._others():
            FolderLock(folder, doing, option, break_lock=self._break_lock).release()
            with suppress(OSError):
                folder.rmdir()

    def begin(self, begun_with: Mapping[str, Any], *, restart: bool) -> None:
        """Writes what the work is begun with, or compares it with what it was begun with."""
        if self._locked == self.path:
            self.refuse_others()
            if restart or not self._kind.has_finished(self.path):
                _clear(self.path)
            # What killed processes have left, such as the results of workers.
            _clear(self.path, ".*.part")
        if not (begun := self.path / BEGUN).exists():
            try:
                write_facts(begun, dict(begun_with), overwrite=False)
            except OutputError:
                # Another share may have begun in the meantime.
                if not begun.exists():
                    raise
        refuse_other(self.path, begun_with, self._kind)

    def leave(self) -> None:
        """Keeps the folder if the work can be continued, and removes it otherwise."""
        if self.lock.is_held:
            remove_locks_of_killed(self.path)
            is_kept = not self.is_published and self._kind.has_finished(self.path)
            if not is_kept and not self._others():
                _clear(self.path)
            is_silent = self.is_quiet or self.is_published
            if not is_silent and (is_kept or isinstance(sys.exception(), KeyboardInterrupt)):
                kept = f"finished parts are kept in {self.path}: the same command continues"
                message = kept if is_kept else "no part is finished: the same command starts over"
                print(printable(message), file=sys.stderr)
        self.lock.release()
        for folder in (self._locked, self.path):
            # Another process may have created a lock there.
            with suppress(OSError):
                folder.rmdir()

    def _others(self) -> list[Path]:
        return [lock.parent for lock in self.path.glob(f"*/{LOCK}") if lock.parent != self._locked]


@contextmanager
def work_folder(
    path: Path,
    begun_with: Mapping[str, Any],
    kind: Kind,
    *,
    restart: bool = False,
    break_lock: bool = False,
    share: str = "",
) -> Iterator[WorkFolder]:
    """Yields a folder of work that was begun with the same settings, if it exists.

    After an error, finished parts are kept, so that the same command continues; if there are none,
    the folder is removed. It is also removed when the block has published the result.

    Args:
        begun_with: everything that the result depends on, as JSON values by flag or name.
        share: what this process computes while others compute other shares; "" is everything, and
            excludes other processes.
    """
    out = path.with_name(path.name.removesuffix(_SUFFIX))
    try:
        path.mkdir(parents=True, exist_ok=True)
        work = WorkFolder(path, kind, share=share, break_lock=break_lock, restart=restart)
    except OSError as error:
        with suppress(OSError):
            path.rmdir()
        raise explain_os_error(error, out) from error
    try:
        with failures_explained(out, OUTPUT_FAULTS):
            work.begin(begun_with, restart=restart)
            work.is_quiet = False
            yield work
            work.is_quiet = True
    finally:
        with suppress(OSError):
            work.leave()


def begun_with(
    settings: Mapping[str, Any],
    *,
    files: Mapping[str, Path | None] | None = None,
    models: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns everything that a result depends on, as JSON values by flag or name.

    Args:
        files: what is read, and compared by its content; None is an option that is not typed.
        models: hashes of models; what they compute depends on the version of PyTorch, too.
    """
    begun: dict[str, Any] = {"protlm": __version__}
    if models is not None:
        # As `torch.__version__`, without the seconds of its import.
        begun |= {"torch": version("torch"), **models}
    hashes = {name: path and sha256_of(path) for name, path in (files or {}).items()}
    return {**begun, **settings, **hashes}


def unfinished(out: Path) -> Path:
    """Returns the work folder of an output."""
    return beside(out, _SUFFIX)


def refuse_finished(out: Path, kind: Kind) -> None:
    """Rejects an existing output, and removes the remains of its work folder."""
    with suppress(OSError, OutputError):
        # `.` and `..` have no name to which a suffix can be added.
        path = unfinished(out) if out.name and out.exists() else None
        if path is not None and path.is_dir() and not kind.has_finished(path):
            with work_folder(path, {}, kind):
                pass
    check_output(out)


def read_begun(path: Path, kind: Kind) -> dict[str, Any] | None:
    """Returns what the work in a folder was begun with; None if nothing was begun there."""
    begun = path / BEGUN
    if not os.path.lexists(begun):
        return None
    part = read_part(begun)
    if part is None:
        raise InputDataError(f"{begun} is damaged or of another version: {kind.advice(path)}")
    return part.facts


def refuse_other(path: Path, begun_with: Mapping[str, Any], kind: Kind) -> None:
    """Refuses finished parts of work that was begun with something else."""
    begun, now = read_begun(path, kind) or {}, json.loads(json.dumps(dict(begun_with)))
    for name in {**begun, **now}:
        if begun.get(name) != now.get(name):
            change = f"{name} {difference(begun.get(name), now.get(name))}"
            raise UserError(
                printable(
                    f"{path} was begun with {change}: use the same options as then to resume it, "
                    f"or {kind.advice(path)}"
                )
            )


def difference(before: Any, now: Any) -> str:
    """Describes the first difference of two JSON values that are not equal.

    >>> difference({"by": "hash", "otherwise": {"x": 0.1}}, {"by": "hash", "otherwise": {"x": 0}})
    'otherwise: x: 0.1, not 0'
    >>> difference(["a.fasta", "b.fasta"], ["b.fasta"])
    'a.fasta, not nothing'
    """
    if isinstance(before, dict) and isinstance(now, dict):
        name = next(name for name in {**before, **now} if before.get(name) != now.get(name))
        return f"{name}: {difference(before.get(name), now.get(name))}"
    if isinstance(before, list) and isinstance(now, list):
        if sorted(before, key=repr) == sorted(now, key=repr):
            return "in another order"
        gone, new = ([one for one in a if one not in b] for a, b in ((before, now), (now, before)))
        return f"{_listed(gone)}, not {_listed(new)}"
    return f"{_listed([before])}, not {_listed([now])}"


def _listed(values: list[Any]) -> str:
    words = {"None": "nothing", "True": "on", "False": "off", "": "nothing"}
    text = ", ".join(str(value) for value in values)
    return words.get(text, _HASH.sub(r"\1", text)[:200])


def _clear(folder: Path, pattern: str = "*") -> None:
    """Removes everything of a pattern but the lock, and hidden files of others."""
    for entry in sorted(folder.glob(pattern), key=lambda entry: entry.name == BEGUN):
        if entry.name != LOCK and (entry.suffix == ".part" or not entry.name.startswith(".")):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)
