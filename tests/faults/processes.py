"""Processes of other runs: how to find them, and how to wait for their steps."""

import multiprocessing
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from protlm.checkpoints.validations import METRICS, read_metrics

fork = multiprocessing.get_context("fork")
# The variables in which launchers write a process's rank, the most reliable first.
RANK_NAMES = ("RANK", "SLURM_PROCID", "LOCAL_RANK")


def descendants(ancestor: int) -> set[int]:
    """Returns the process IDs of all that a process started, and what these started."""
    parents = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            parents[int(entry.name)] = int(fields[1])
    found, level = set[int](), {ancestor}
    while level := {pid for pid, parent in parents.items() if parent in level}:
        found |= level
    return found


def ranks_below(ancestor: int) -> dict[int, int]:
    """Returns the process IDs of the ranks of a run among a process's descendants, by rank."""
    ranks = {}
    for pid in descendants(ancestor):
        with suppress(OSError):
            is_trainer = b"protlm.train" in Path(f"/proc/{pid}/cmdline").read_bytes()
            pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
            variables = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
            names = [name for name in RANK_NAMES if name in variables]
            if names and is_trainer:
                ranks[int(variables[names[0]])] = pid
    return ranks


def wait_for_step(run: Path, step: int, *processes: "subprocess.Popen[str]") -> None:
    """Waits until the log of a run has a step; fails if a process of it ends before."""
    deadline = time.monotonic() + 200
    while not any(row["step"] >= step for row in read_metrics(run / METRICS)):
        assert all(process.poll() is None for process in processes), "a process has ended"
        assert time.monotonic() < deadline, "the run does not begin"
        time.sleep(0.05)
