"""Memory of the C library: what is freed is kept for the next tensor."""

import ctypes
import os

# Parameters of mallopt(3), and their values in bytes.
_MMAP_THRESHOLD = -3
# glibc before 2.35 takes no more than 32 MiB for blocks, and there the first value stays.
_SETTINGS = ((-1, 1 << 30), (_MMAP_THRESHOLD, 32 << 20), (_MMAP_THRESHOLD, 512 << 20))
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Makes glibc keep 1 GiB of freed memory, instead of returning every tensor to the system.

    Otherwise a quarter of the time of an evaluation on a CPU goes to fresh pages, which the system
    clears (docs/decisions/0032). This is for processes of protlm's own, not for a library that
    others use. It does nothing with another C library, or if the environment has such settings.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None and not any(name in os.environ for name in _VARIABLES):
        for parameter, value in _SETTINGS:
            set_option(parameter, value)
