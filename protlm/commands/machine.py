"""Facts about this machine: versions, devices, memory, disk, locale, and the speed of dtypes."""

import os
import platform
import shutil
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import torch

from protlm import __version__

_PACKAGES = ("torch", "pytorch-lightning", "numpy", "h5py", "scikit-learn", "safetensors")
_SIZE = 512
_SECONDS = 0.25
_MEMORY = Path("/proc/meminfo")
_CGROUPS, _OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def versions() -> dict[str, str]:
    """Returns the versions of protlm, Python and the packages that it needs most."""
    found = {"protlm": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def processors() -> int:
    """Returns the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpus() -> list[dict[str, str | int]]:
    """Returns the name, the total and the free memory in bytes of each GPU."""
    found = []
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        found.append({"name": name, "total_bytes": total, "free_bytes": free})
    return found


def available_memory() -> int | None:
    """Returns the bytes that are available to this process, or None if the system hides them.

    The limits of a container or a job are respected if they are those of cgroups, version 2: of
    this process's group and of all that contain it. Files in the cache that were not used lately do
    not count as used, as in MemAvailable: the kernel drops them when memory is needed.
    """
    found = []
    try:
        lines = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    for group in _cgroups():
        try:
            limit, used = ((group / f"memory.{name}").read_text() for name in ("max", "current"))
            free = int(limit) - int(used) + _droppable(group)
            found.append(min(max(free, 0), int(limit)))
        except (OSError, ValueError):
            # No such file, or "max": there is no limit.
            pass
    return min(found) if found else None


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
    own = next((line[3:] for line in lines if line.startswith("0::/")), "/")
    # In a container, the path may be outside of what is mounted.
    names = [name for name in own.split("/") if name not in ("", "..")]
    return [_CGROUPS.joinpath(*names[:depth]) for depth in range(len(names), -1, -1)]


def disks() -> dict[str, dict[str, int | bool]]:
    """Returns for this folder and the temporary one the free bytes, and whether it is writable."""
    found = {}
    for folder in dict.fromkeys([Path.cwd(), Path(tempfile.gettempdir())]):
        free = shutil.disk_usage(folder).free
        found[str(folder)] = {"free_bytes": free, "writable": os.access(folder, os.W_OK)}
    return found


def encodings() -> dict[str, str]:
    """Returns the encodings of standard output and of file names."""
    output = getattr(sys.stdout, "encoding", None) or "none"
    return {"output": output, "file_names": sys.getfilesystemencoding()}


def dtype_speeds(device: torch.device) -> dict[str, float]:
    """Measures products of matrices of 512 × 512, in GFLOP/s by dtype; takes about half a second.

    Args:
        device: the device to measure.
    """
    return {str(dtype)[6:]: _speed(device, dtype) for dtype in (torch.float32, torch.bfloat16)}


def _speed(device: torch.device, dtype: torch.dtype) -> float:
    a, b = (torch.ones(_SIZE, _SIZE, dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    end = time.perf_counter() + _SECONDS
    # The first product also loads kernels; the fastest one is disturbed least by other work.
    while time.perf_counter() < end or best == float("inf"):
        start = time.perf_counter()
        c = a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
        del c
    return 2 * _SIZE**3 / best / 1e9
