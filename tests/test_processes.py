"""Processes that protlm starts: a module in the working folder replaces none of theirs."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize("name", ["train", "evaluate", "protlm.train", "protlm.commands.evaluate"])
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
