"""Warns from the program's own code and from another library's."""

import warnings

from protlm.system import errors


def command() -> None:
    """Warns twice."""
    source = "warnings.warn('odd, but harmless')"
    exec(compile(source, errors.__file__, "exec"), {"warnings": warnings})
    warnings.warn("another's", UserWarning, stacklevel=1)


if __name__ == "__main__":
    errors.exit_with_message(command)
