"""MMseqs2, run as an external program."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from protlm.errors import InputDataError, OutputError, UserError

_LAST_LINES = 3


def find_mmseqs() -> str:
    """Returns the path of the executable.

    Raises:
        UserError: MMseqs2 is not installed; the message explains how to install it.
    """
    executable = shutil.which("mmseqs")
    if executable is None:
        raise UserError(
            "MMseqs2 is not installed (no mmseqs on the PATH); type: conda install -c "
            "conda-forge -c bioconda mmseqs2, or: apt install mmseqs2, or unpack a release of "
            "github.com/soedinglab/MMseqs2"
        )
    return executable


def run_mmseqs(arguments: Sequence[str | Path]) -> None:
    """Runs MMseqs2 quietly.

    Raises:
        UserError: MMseqs2 is not installed.
        OutputError: MMseqs2 ran out of disk space.
        InputDataError: MMseqs2 failed otherwise; the message ends with its last lines.
    """
    command = [find_mmseqs(), *map(str, arguments), "-v", "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="backslashreplace", check=False
    )
    if done.returncode == 0:
        return
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    reason = "; ".join(lines[-_LAST_LINES:]) or "it printed nothing"
    kind = OutputError if "no space" in reason.lower() else InputDataError
    raise kind(f"mmseqs {arguments[0]} ended with {done.returncode}: {reason}")
