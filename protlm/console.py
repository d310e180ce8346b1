"""Where tables are printed: as wide as the terminal, and elsewhere as wide as they are."""

import sys

from rich.console import Console

# No row is so long, and nothing is padded to it.
_UNBOUNDED = 1 << 20


def console(*, stderr: bool = False) -> Console:
    """A console on standard output, or on standard error.

    A file or a pipe has no width: rich would take 80 columns, and cut names there.
    """
    stream = sys.stderr if stderr else sys.stdout
    is_terminal = stream is not None and stream.isatty()
    return Console(stderr=stderr, width=None if is_terminal else _UNBOUNDED)
