"""The places of shipped files, and outputs that get their final name once they are complete."""

import errno
import hashlib
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from protlm.system.errors import FULL_DISK, InputDataError, OutputError, UserError

# Errors of the system that mean that an output cannot be written.
OUTPUT_FAULTS = frozenset({*FULL_DISK, errno.EACCES, errno.EROFS, errno.EPERM})
# The beginning of what Git LFS writes in the place of a file.
_POINTER = b"version https://git-lfs.github.com/spec/"
_LONGEST_NAME = 255
_PACKAGE = Path(__file__).resolve().parents[1]
# Tells containers apart, whose processes do not see each other.
_PID_NAMESPACE = Path("/proc/self/ns/pid")


def sample_dir() -> Path:
    """Returns the folder of the sample."""
    return shipped("data_prep/sample")


def cache_dir() -> Path:
    """Returns the user's folder for what can be found again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "protlm"


def shipped(name: str) -> Path:
    """Returns a folder or a file: in `protlm` when installed, beside it in a checkout."""
    installed = _PACKAGE / name
    return installed if installed.exists() else _PACKAGE.parent / name


def in_home(path: str) -> str:
    """Replaces a home folder, `~` or `~USER` at the start of a path.

    The shell does so only at the start of a word, not in `--output=~/x` or within quotes.
    """
    expanded = os.path.expanduser(path)  # noqa: PTH111 - Path would drop a final slash
    if expanded.startswith("~") and not os.path.lexists(path):
        user = path.split("/", 1)[0][1:]
        raise UserError(f"{path}: there is no user {user}; type ./{path} for a file of this name")
    return expanded


def sha256_of(*paths: Path) -> str:
    """Returns the SHA-256 of a file, or of several one after the other, in hexadecimal."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def existing_file(path: Path, what: str, *, or_folder: bool = False) -> Path:
    """Returns `path` if it is a readable file, or a folder where it may be one."""
    try:
        if path.is_dir():
            if or_folder:
                return path
            more = ", or the sequences of structures (docs/embed.md)" if "sequence" in what else ""
            raise InputDataError(f"{path} is a folder, not {what}: give the path of a file{more}")
        if not path.is_file() and path.exists():
            raise InputDataError(
                f"{path} is a pipe or a device, not {what}: write its data to a file first"
            )
        if not path.is_file():
            raise InputDataError(f"{path}: no such file; give the path of {what}")
    except OSError as error:
        # A parent folder may be inaccessible.
        raise InputDataError(f"{path} cannot be read: {error.strerror}") from error
    if not os.access(path, os.R_OK):
        raise InputDataError(f"{path} cannot be read: no permission; type: chmod u+r {path}")
    refuse_pointer(path)
    return path


def refuse_pointer(path: Path) -> None:
    """Refuses a file that Git has in the place of a large one."""
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise InputDataError(
                f"{path} is a pointer of Git LFS, without the contents; type, in its folder: "
                "git lfs pull"
            )


def explain_os_error(error: OSError, path: Path) -> OutputError:
    """Turns a failed write into an error of one sentence that says what to do."""
    if error.errno in FULL_DISK:
        return OutputError(f"{path}: no space left; free some or write to another disk")
    return OutputError(f"{path} cannot be written: {error.strerror or error}")


@contextmanager
def failures_explained(path: Path, faults: Collection[int] | None = None) -> Iterator[None]:
    """Explains failed writes of a block: those of some errors of the system, or all."""
    try:
        yield
    except OSError as error:
        if faults is not None and error.errno not in faults:
            raise
        raise explain_os_error(error, path) from error


def fsync(path: Path) -> None:
    """Waits until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_output(path: Path, *, overwrite: bool = False) -> None:
    """Refuses an output that cannot be written, before any work is done for it."""
    # A link to nothing is there, too.
    if os.path.lexists(path) and not overwrite:
        raise _already_there(path)
    if path.name:
        # Its name may be too long; Linux counts processes up to here.
        _temporary(path, 1 << 22, "0" * 8)
    parent = next(filter(os.path.lexists, path.absolute().parents), Path("/"))
    with failures_explained(path):
        # A parent folder may be inaccessible.
        if not parent.is_dir():
            raise OutputError(f"{path} cannot be written: {parent} is not a folder")
        with tempfile.TemporaryFile(dir=parent):
            pass


def beside(output: Path, suffix: str, prefix: str = "") -> Path:
    """Returns the path of what is kept beside an output: its name with a suffix."""
    name = f"{prefix}{output.name}{suffix}"
    if len(os.fsencode(name)) > _LONGEST_NAME:
        most = _LONGEST_NAME - len(f"{prefix}{suffix}")
        raise OutputError(
            f"{output}: a name has at most {most} bytes, as {prefix}NAME{suffix} is needed"
        )
    return output.with_name(name)


def _already_there(path: Path) -> OutputError:
    return OutputError(f"{path} exists already: remove it or choose another name")


def finish(made: Path, path: Path, *, overwrite: bool = False) -> None:
    """Syncs a complete file or folder to the disk, and gives it its final name.

    Unless it may be overwritten, an output that another process finished meanwhile is kept: of two
    that finish a file in the same instant, one fails, where the file system has links.
    """
    # Names are stored in folders, which have to be on the disk too.
    for written in [*made.rglob("*"), made]:
        fsync(written)
    if overwrite and path.is_dir():
        shutil.rmtree(path)
    if overwrite or made.is_dir() or not _link(made, path):
        if os.path.lexists(path) and not overwrite:
            raise _already_there(path)
        made.replace(path)
    fsync(path.absolute().parent)


def _link(made: Path, path: Path) -> bool:
    """Gives a file its name unless that is taken; false on a file system without links."""
    try:
        os.link(made, path)
    except FileExistsError:
        raise _already_there(path) from None
    except OSError:
        return False
    made.unlink()
    return True


def _temporary(path: Path, pid: int | str, token: str) -> Path:
    """Returns the temporary name of an output, with the machine and the process that write it.

    The token tells processes of one number apart, on machines that have one name.
    """
    host = re.sub(r"[^\w-]", "_", socket.gethostname())[:30]
    space = f"-{_PID_NAMESPACE.stat().st_ino}" if _PID_NAMESPACE.exists() else ""
    return beside(path, f".{host}{space}.{pid}.{token}.part", prefix=".")


def _clear_parts(path: Path) -> None:
    """Removes the temporary files of an output that killed processes left.

    Those of other machines and containers, whose processes are not seen here, stay.
    """
    with suppress(OSError):
        for entry in path.absolute().parent.iterdir():
            by = re.fullmatch(r".+\.(\d{1,9})\.(\w{8})\.part", entry.name)
            is_one = by and entry.name == _temporary(path, *by.groups()).name
            if by and is_one and not _is_alive(int(by[1])):
                _remove(entry)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # It is of another user.
        pass
    return True


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def complete_file(
    path: Path, *, overwrite: bool = False, check: Callable[[], object] = lambda: None
) -> Iterator[Path]:
    """Yields a temporary path beside `path`; what is there gets its name when it is complete.

    Just before that, `check` may refuse. On any exception the temporary file or folder is removed
    and `path` is left unchanged.
    """
    check_output(path, overwrite=overwrite)
    _clear_parts(path)
    temporary = _temporary(path, os.getpid(), secrets.token_hex(4))
    try:
        with failures_explained(path, OUTPUT_FAULTS):
            path.absolute().parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            check()
            finish(temporary, path, overwrite=overwrite)
    finally:
        _remove(temporary)


@contextmanager
def complete_folder(
    path: Path, *, overwrite: bool = False, check: Callable[[], object] = lambda: None
) -> Iterator[Path]:
    """Yields a temporary folder beside `path`, as `complete_file` does."""
    with complete_file(path, overwrite=overwrite, check=check) as folder:
        folder.mkdir()
        yield folder


def scratch_name(name: str, folder: Path | None = None) -> dict[str, Any]:
    """Returns the arguments of `tempfile` for a temporary file or folder.

    Those of this name that killed processes of this machine left are removed. The default folder is
    `TMPDIR`.
    """
    path = (folder or Path(tempfile.gettempdir())) / name
    _clear_parts(path)
    # The tokens of `tempfile` have eight letters, too.
    prefix, _, suffix = _temporary(path, os.getpid(), "*").name.partition("*")
    return {"prefix": prefix, "suffix": suffix, "dir": path.parent}


@contextmanager
def all_or_none() -> Iterator[list[Path]]:
    """Yields a list for the files that are written before the last one; they go if that fails."""
    written: list[Path] = []
    try:
        yield written
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise
