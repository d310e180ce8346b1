"""Where the shipped files are, and how an output comes to stand under its final name."""

import errno
import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from protlm.errors import InputDataError, OutputError, UserError

_CHUNK = 1 << 20
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# The system's errors that mean: here nothing can be written.
OUTPUT_FAULTS = frozenset({*_NO_SPACE, errno.EACCES, errno.EROFS, errno.EPERM})
_PACKAGE = Path(__file__).resolve().parent


def conf_dir() -> Path:
    """The folder of Hydra configs: `protlm/conf` when installed, `conf/` in a checkout."""
    installed = _PACKAGE / "conf"
    return installed if installed.is_dir() else _PACKAGE.parent / "conf"


def sample_dir() -> Path:
    """The folder of the shipped UniProt sample."""
    spec = importlib.util.find_spec("data_prep")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("the shipped sample is missing: reinstall protlm with its data_prep folder")
    return Path(next(iter(spec.submodule_search_locations))) / "sample"


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def existing_file(path: Path, what: str) -> Path:
    """Returns `path` if it is a readable file; else the error says what was looked for."""
    try:
        if path.is_dir():
            raise InputDataError(f"{path} is a folder, not {what}: give the path of a file")
        if not path.is_file() and path.exists():
            raise InputDataError(
                f"{path} is a pipe or a device, not {what}: write what it gives to a file first"
            )
        if not path.is_file():
            raise InputDataError(f"{path}: no such file; give the path of {what}")
    except OSError as error:
        # A folder on the way may be closed to us.
        raise InputDataError(f"{path} cannot be read: {error.strerror}") from error
    if not os.access(path, os.R_OK):
        raise InputDataError(f"{path} cannot be read: no permission; type: chmod u+r {path}")
    return path


def explain_os_error(error: OSError, path: Path) -> OutputError:
    """Turns a failed write into one sentence that says what to do."""
    if error.errno in _NO_SPACE:
        return OutputError(f"{path}: no space left; free some or write to another disk")
    return OutputError(f"{path} cannot be written: {error.strerror or error}")


def fsync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_output(path: Path, *, overwrite: bool = False) -> None:
    """Refuses an output that cannot be made, before any work is done for it."""
    try:
        # A folder on the way may be closed to us.
        if path.exists() and not overwrite:
            raise OutputError(f"{path} exists already: remove it or choose another name")
        parent = path.absolute().parent
        while not parent.exists():
            parent = parent.parent
        if not parent.is_dir():
            raise OutputError(f"{path} cannot be written: {parent} is not a folder")
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise explain_os_error(error, path) from error


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(FileNotFoundError):
            path.unlink()


@contextmanager
def _complete_output(path: Path, *, is_dir: bool, overwrite: bool) -> Iterator[Path]:
    check_output(path, overwrite=overwrite)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        if is_dir:
            temporary.mkdir()
        yield temporary
        # Names are in folders, which have to be on the disk too.
        for written in [*temporary.rglob("*"), temporary] if is_dir else [temporary]:
            fsync(written)
        if path.is_dir() and overwrite:
            shutil.rmtree(path)
        temporary.replace(path)
        fsync(path.absolute().parent)
    except OSError as error:
        if error.errno in OUTPUT_FAULTS:
            raise explain_os_error(error, path) from error
        raise
    finally:
        _remove(temporary)


def complete_file(path: Path, *, overwrite: bool = False) -> AbstractContextManager[Path]:
    """Yields a temporary path beside `path`; the file gets its name only when it is complete.

    On any exception the temporary file is removed and `path` is as it was before.
    """
    return _complete_output(path, is_dir=False, overwrite=overwrite)


def complete_folder(path: Path, *, overwrite: bool = False) -> AbstractContextManager[Path]:
    """Yields a temporary folder beside `path`; it gets its name only when it is complete."""
    return _complete_output(path, is_dir=True, overwrite=overwrite)
