"""The C library's heap, which a pass that keeps many tensors leaves full of holes."""

import ctypes
import platform


def give_back_freed_memory() -> None:
    """Returns the holes of glibc's heap to the system; other C libraries are left as they are.

    Else the process grows from pass to pass, to several times of what any of them held.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
