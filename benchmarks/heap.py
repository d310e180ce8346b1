"""The C library's heap: what a pass frees is kept for the next one, and given back in the end."""

import ctypes
import platform

# From malloc.h: what is larger than the threshold is mapped anew each time, so many at most.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


_is_kept = False


def keep_freed_memory() -> None:
    """Lets glibc keep what is freed, as jemalloc and tcmalloc do; others are left as they are.

    Else every tensor above 32 MB, and after a large pass every other one, is made of pages that
    the system has to find and clear first: up to half of the time of a pass, and of
    performer-pytorch's causal one two thirds.
    """
    global _is_kept
    _is_kept = True
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def give_back_freed_memory() -> None:
    """Returns the holes of glibc's heap to the system.

    Else the process grows from pass to pass, to several times of what any of them held.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def keeps_freed_memory() -> bool:
    """Whether `keep_freed_memory` was called, which a process that is started has to be told."""
    return _is_kept
