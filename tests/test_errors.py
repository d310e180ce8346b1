"""How commands report errors and warnings."""

import subprocess
import sys

PROGRAM = """
import warnings
from protlm import errors

def command():
    source = "warnings.warn('odd, but harmless')"
    exec(compile(source, errors.__file__, "exec"), {"warnings": warnings})
    warnings.warn("another's", UserWarning)

errors.exit_with_message(command)
"""


def test_only_the_warnings_of_libraries_contain_their_place() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    ours, theirs = done.stderr.splitlines()
    assert done.returncode == 0
    assert ours == "protlm: warning: odd, but harmless"
    assert theirs == "<string>:8: UserWarning: another's"
