"""How commands report errors and warnings."""

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "programs" / "warn.py"


def test_only_the_warnings_of_libraries_contain_their_place() -> None:
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, check=False)
    ours, theirs = done.stderr.splitlines()
    assert done.returncode == 0
    assert ours == "protlm: warning: odd, but harmless"
    assert theirs == f"{PROGRAM}:12: UserWarning: another's"
