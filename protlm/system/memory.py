"""The memory that is free, of a GPU or for this process, and lists that are small enough for it."""

import os
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")
_MEMORY, _OWN_SIZE = Path("/proc/meminfo"), Path("/proc/self/statm")
_PAGE = resource.getpagesize()
_CGROUPS, _OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_memory() -> int | None:
    """Returns the bytes that are available to this process, or None if the system hides them.

    The limit of the shell (`ulimit -v`) is respected, and those of a container or a job if they are
    those of cgroups, version 2: of this process's group and of all that contain it. Files in the
    cache that were not used lately do not count as used, as in MemAvailable: the kernel drops them
    when memory is needed.
    """
    limits = []
    with suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
        limits.append(int(lines["MemAvailable"].split()[0]) * 1024)
    for group in _cgroups():
        # No such file, or "max": there is no limit.
        with suppress(OSError, ValueError):
            limit, used = ((group / f"memory.{name}").read_text() for name in ("max", "current"))
            free = int(limit) - int(used) + _droppable(group)
            limits.append(min(max(free, 0), int(limit)))
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and _OWN_SIZE.exists():
        limits.append(max(limit - int(_OWN_SIZE.read_text().split()[0]) * _PAGE, 0))
    return min(limits) if limits else None


def free_memory(device: torch.device) -> int:
    """Returns the free memory of a device, or what is available to this process, in bytes."""
    if device.type == "cuda":
        # What torch keeps for its next tensors is free, too.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    found = available_memory()
    return os.sysconf("SC_AVPHYS_PAGES") * _PAGE if found is None else found


def _droppable(group: Path) -> int:
    """Returns the bytes of a cgroup's inactive file cache; 0 if it has no statistics."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
        return int(dict(line.split() for line in lines)["inactive_file"])
    except (OSError, KeyError, ValueError):
        return 0


def _cgroups() -> list[Path]:
    """Returns the folders of this process's cgroup and of those that contain it, to the root."""
    try:
        lines = _OWN_CGROUP.read_text().splitlines()
    except OSError:
        lines = []
    group = next((line[3:] for line in lines if line.startswith("0::/")), "/")
    # In a container, the path may be outside of what is mounted.
    names = [name for name in group.split("/") if name not in ("", "..")]
    return [_CGROUPS.joinpath(*names[:depth]) for depth in range(len(names), -1, -1)]


def blocks_of(
    items: Iterable[T], size_of: Callable[[T], int], least: int, *, most: int = 0
) -> Iterator[list[T]]:
    """Yields consecutive items in lists of a size, in all, or a little more.

    With each list, a size below `most` is doubled.
    """
    block, size = list[T](), 0
    for item in items:
        block.append(item)
        size += size_of(item)
        if size >= least:
            yield block
            block, size, least = [], 0, max(least, min(2 * least, most))
    if block:
        yield block


def readable_size(num_bytes: float) -> str:
    """Returns a number of bytes in the largest unit that it fills.

    >>> readable_size(1_536)
    '1.5 kB'
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes:.0f} bytes"
