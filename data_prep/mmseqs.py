"""MMseqs2, run as an external program."""

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from protlm.system.errors import InputDataError, OutputError, UserError

_LAST_LINES = 3
# Becomes a program, beside a process that kills their group when standard input closes: when the
# process that started it ends, even by SIGKILL.
_LEASH = """exec 3<&0; (read -r _ <&3; kill -KILL 0) >/dev/null 2>&1 &
exec "$@" </dev/null 3<&-"""


def find_mmseqs() -> str:
    """Returns the path of the executable."""
    executable = shutil.which("mmseqs")
    if executable is None:
        raise UserError(
            "MMseqs2 is not installed (no mmseqs on the PATH); type: conda install -c "
            "conda-forge -c bioconda mmseqs2, or: apt install mmseqs2, or unpack a release of "
            "github.com/soedinglab/MMseqs2"
        )
    return executable


def run_mmseqs(arguments: Sequence[str | Path]) -> None:
    """Runs MMseqs2 quietly; it ends with this process, and so do the processes that it starts."""
    command = [find_mmseqs(), *map(str, arguments), "-v", "1"]
    watched, held = os.pipe()
    try:
        with subprocess.Popen(
            ["/bin/sh", "-c", _LEASH, "sh", *command],
            stdin=watched,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            try:
                printed = process.communicate()
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
    finally:
        os.close(watched)
        os.close(held)
    if process.returncode == 0:
        return
    lines = [
        line.strip()
        for line in b"".join(printed).decode(errors="backslashreplace").splitlines()
        if line.strip()
    ]
    reason = "; ".join(lines[-_LAST_LINES:]) or "it printed nothing"
    kind = OutputError if "no space" in reason.lower() else InputDataError
    raise kind(f"mmseqs {arguments[0]} ended with {process.returncode}: {reason}")
