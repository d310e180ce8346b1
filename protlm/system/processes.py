"""What a process of protlm sets up for itself before it imports anything else."""

import os
import sys
from contextlib import suppress
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[2]
# Parameters of mallopt(3), and their values in bytes.
_MMAP_THRESHOLD = -3
# glibc before 2.35 takes no more than 32 MiB for blocks, and there the first value stays.
_SETTINGS = ((-1, 1 << 30), (_MMAP_THRESHOLD, 32 << 20), (_MMAP_THRESHOLD, 512 << 20))
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def ignore_modules_of_working_folder() -> None:
    """Keeps the working folder out of the import path, here and in every process started later.

    `python -m` puts it first, so that a file such as `random.py` there would replace a module of
    Python. Ranks and other children inherit the variable. A checkout of protlm that is the working
    folder stays: it may be run without being installed.
    """
    with suppress(OSError):
        if Path.cwd() == _CHECKOUT:
            return
        if not sys.flags.safe_path and sys.path[0] in ("", str(Path.cwd())):
            del sys.path[0]
    os.environ["PYTHONSAFEPATH"] = "1"


def keep_freed_memory() -> None:
    """Makes glibc keep 1 GiB of freed memory, instead of returning every tensor to the system.

    Otherwise a quarter of the time of an evaluation on a CPU goes to fresh pages, which the system
    clears (docs/decisions/0032). This is for processes of protlm's own, not for a library that
    others use. It does nothing with another C library, or if the environment has such settings.
    """
    # Not before the import path is safe.
    import ctypes

    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None and not any(name in os.environ for name in _VARIABLES):
        for parameter, value in _SETTINGS:
            set_option(parameter, value)


def return_freed_memory() -> None:
    """Makes glibc return all freed memory to the system, before work of another kind."""
    import ctypes

    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
