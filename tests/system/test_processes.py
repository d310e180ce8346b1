"""Processes of protlm: no module in the working folder is imported, and freed memory is kept."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from protlm.system import processes

PROTLM = Path(sys.executable).with_name("protlm")
BAD = "import os\nos.write(2, b'FOREIGN ' + __name__.encode())\nos._exit(9)\n"


def run(folder: Path, names: str, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a command as its user does, without PYTHONPATH, beside modules of these names."""
    (folder / "protlm").mkdir()
    for name in names.split():
        (folder / f"{name}.py").write_text(BAD)
    without = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SLURM_"))}
    named: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300}
    environment = without | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, check=False, **named)


@pytest.mark.parametrize("name", ["train", "evaluate", "protlm.train"])
def test_modules_in_the_working_folder_are_not_imported(name: str, tmp_path: Path) -> None:
    """By hand, Python imports the first modules before it reads a line of protlm."""
    command = [sys.executable, "-m", name] if "." in name else [PROTLM, name]
    first = "" if "." in name else "random inspect threading protlm/__init__"
    done = run(tmp_path, f"yaml torch typer hydra rich {first}", *command, "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage: protlm" in done.stdout


@pytest.mark.slow
def test_ranks_and_loader_workers_ignore_the_working_folder(
    tmp_path: Path, tiny_settings: list[str]
) -> None:
    settings = ["run_dir=run", "trainer.devices=2", "trainer.max_steps=2", "data.num_workers=1"]
    names = "random yaml torch inspect threading protlm/__init__"
    done = run(tmp_path, names, PROTLM, "train", *tiny_settings, *settings)
    assert done.returncode == 0, done.stderr
    assert "FOREIGN" not in done.stderr
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()


PROGRAM = """
import resource
import sys
import numpy as np
from protlm.system.processes import keep_freed_memory

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
