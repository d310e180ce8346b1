"""How commands report errors and warnings."""

import errno
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from protlm.system.errors import ExitCode, exit_with_message

PROGRAM = Path(__file__).parent / "programs" / "warn.py"


def test_only_the_warnings_of_libraries_contain_their_place() -> None:
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, check=False)
    ours, theirs = done.stderr.splitlines()
    assert done.returncode == 0
    assert ours == "protlm: warning: odd, but harmless"
    assert theirs == f"{PROGRAM}:12: UserWarning: another's"


def _system(number: int, *name: str) -> OSError:
    return OSError(number, os.strerror(number), *name)


# What Python, torch and the system raise, the exit code, and what the sentence says.
FAULTS: dict[str, tuple[Exception, ExitCode, str]] = {
    "memory": (MemoryError(), ExitCode.USAGE, "memory is full or limited"),
    "memory of torch": (
        RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 256 bytes."
        ),
        ExitCode.USAGE,
        "you tried to allocate 256 bytes",
    ),
    "memory of a card": (RuntimeError("CUDA out of memory."), ExitCode.USAGE, "smaller batches"),
    "memory of a library": (
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        ExitCode.USAGE,
        "ulimit -v",
    ),
    "memory of a child": (_system(errno.ENOMEM), ExitCode.USAGE, "ulimit -v"),
    "threads": (RuntimeError("can't start new thread"), ExitCode.USAGE, "ulimit -u"),
    "processes": (_system(errno.EAGAIN), ExitCode.USAGE, "ulimit -u"),
    "files": (_system(errno.EMFILE, "x"), ExitCode.USAGE, "ulimit -n"),
    "disk": (_system(errno.ENOSPC, "/d/x"), ExitCode.OUTPUT, "/d/x: no space left"),
    "size of files": (_system(errno.EFBIG), ExitCode.OUTPUT, "standard output: no space left"),
    "temporary folder": (
        FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/t']"),
        ExitCode.OUTPUT,
        "set TMPDIR",
    ),
    "current folder": (_system(errno.ENOENT), ExitCode.USAGE, "current folder was removed"),
    "permission": (_system(errno.EACCES, "/d/x"), ExitCode.BAD_INPUT, "/d/x cannot be used"),
    "a long name": (_system(errno.ENAMETOOLONG, "x"), ExitCode.BAD_INPUT, "x cannot be used"),
    "a broken disk": (_system(errno.EIO, "x"), ExitCode.BAD_INPUT, "x cannot be used"),
    "exists": (FileExistsError(errno.EEXIST, "File exists", "out"), ExitCode.OUTPUT, "written"),
    "encoding": (
        UnicodeEncodeError("ascii", "é", 0, 1, "ordinal not in range(128)"),
        ExitCode.OUTPUT,
        "PYTHONIOENCODING=utf-8",
    ),
}


@pytest.fixture
def said_by(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Exception], tuple[object, str]]:
    """Returns the exit code and the words of a command that fails with an error."""
    monkeypatch.setattr("protlm.system.errors._discard_output", lambda: None)
    monkeypatch.setattr("warnings.formatwarning", warnings.formatwarning)

    def run(error: Exception) -> tuple[object, str]:
        def command() -> NoReturn:
            raise error

        with pytest.raises(SystemExit) as end:
            exit_with_message(command)
        return end.value.code, capsys.readouterr().err

    return run


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_system_is_one_sentence(
    fault: str, said_by: Callable[[Exception], tuple[object, str]]
) -> None:
    error, code, words = FAULTS[fault]
    found, said = said_by(error)
    assert (found, len(said.splitlines())) == (code, 1)
    assert words in said


@pytest.mark.parametrize("error", [KeyError("x"), _system(errno.ENOENT, "x"), RuntimeError("x")])
def test_a_fault_of_protlm_shows_its_place(
    error: Exception, said_by: Callable[[Exception], tuple[object, str]]
) -> None:
    code, said = said_by(error)
    assert code == ExitCode.INTERNAL
    assert "Traceback" in said and "please report it" in said
