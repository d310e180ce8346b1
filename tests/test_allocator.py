"""Freed memory is kept: seen in the pages that a process has to be given."""

import os
import subprocess
import sys

import pytest

from protlm import allocator

PROGRAM = """
import resource
import numpy as np
from protlm.allocator import keep_freed_memory

keep_freed_memory()
for turn in range(60):
    if turn == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    both = np.ones(1 << 20), np.ones(2 << 20)
    del both
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(**environment: str) -> int:
    """Page faults of 50 turns that each need 24 MiB."""
    kept = {name: v for name, v in os.environ.items() if name not in allocator._VARIABLES}
    command = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(
        command, env=kept | environment, capture_output=True, text=True, check=True
    )
    return int(run.stdout)


def test_tensors_take_the_pages_of_earlier_ones() -> None:
    # Thresholds of the user's count, so these are the pages without ours.
    returned = page_faults(MALLOC_MMAP_THRESHOLD_="131072", MALLOC_TRIM_THRESHOLD_="131072")
    assert page_faults() < returned / 10


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _: object())
    allocator.keep_freed_memory()
