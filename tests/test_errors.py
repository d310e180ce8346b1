"""How commands tell of errors and warnings."""

import subprocess
import sys

PROGRAM = """
import warnings
from protlm import errors

def command():
    source = "warnings.warn('odd, but it goes on')"
    exec(compile(source, errors.__file__, "exec"), {"warnings": warnings})
    warnings.warn("another's", UserWarning)

errors.exit_with_message(command)
"""


def test_a_warning_is_a_sentence_and_that_of_a_library_says_where() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    ours, theirs = done.stderr.splitlines()
    assert done.returncode == 0
    assert ours == "protlm: warning: odd, but it goes on"
    assert theirs == "<string>:8: UserWarning: another's"
