"""Freed memory is kept: seen in the pages that a process has to be given."""

import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from protlm import processes

PROGRAM = """
import resource
import sys
import numpy as np
from protlm.processes import keep_freed_memory

if sys.argv[1:] == ["keep"]:
    keep_freed_memory()
for turn in range(60):
    if turn == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    # 120 MiB: more than glibc keeps of blocks whose size it has seen.
    blocks = [np.ones(3 << 20) for _ in range(5)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(*arguments: str) -> int:
    """Page faults of 50 turns that each need 120 MiB."""
    kept = {name: v for name, v in os.environ.items() if name not in processes._VARIABLES}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    run = subprocess.run(command, env=kept, capture_output=True, text=True, check=True)
    return int(run.stdout)


def test_tensors_take_the_pages_of_earlier_ones() -> None:
    assert page_faults("keep") < page_faults() / 10


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    processes.keep_freed_memory()


@pytest.mark.parametrize("is_set", [True, False])
def test_settings_of_the_user_count(is_set: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *values: calls.append(values))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    for name in processes._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if is_set:
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    processes.keep_freed_memory()
    assert calls == ([] if is_set else [(-1, 1 << 30), (-3, 32 << 20), (-3, 512 << 20)])
