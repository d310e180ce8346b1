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
