"""MMseqs2, where it is installed, as a program that is run."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from protlm.errors import InputDataError, OutputError, UserError

_LAST_LINES = 3


def find_mmseqs() -> str:
    """The executable.

    Raises:
        UserError: it is not installed; the message says how to get it.
    """
    executable = shutil.which("mmseqs")
    if executable is None:
        raise UserError(
            "MMseqs2 is not installed (there is no mmseqs on the PATH); type: conda install -c "
            "conda-forge -c bioconda mmseqs2, or: apt install mmseqs2, or unpack a release of "
            "github.com/soedinglab/MMseqs2"
        )
    return executable


def run_mmseqs(arguments: Sequence[str | Path]) -> None:
    """Runs MMseqs2 quietly.

    Raises:
        UserError: it is not installed.
        OutputError: it found no space.
        InputDataError: it failed otherwise; the message ends with what it said last.
    """
    command = [find_mmseqs(), *map(str, arguments), "-v", "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="backslashreplace", check=False
    )
    if done.returncode == 0:
        return
    said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    reason = "; ".join(said[-_LAST_LINES:]) or "it said nothing"
    kind = OutputError if "no space" in reason.lower() else InputDataError
    raise kind(f"mmseqs {arguments[0]} ended with {done.returncode}: {reason}")
