"""Processes that protlm starts: a module in the working folder replaces none of theirs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROTLM = Path(sys.executable).with_name("protlm")
BAD = "import os\nos.write(2, b'FOREIGN ' + __name__.encode())\nos._exit(9)\n"


@pytest.fixture
def with_foreign_modules(tmp_path: Path) -> Path:
    """A working folder with files that have the names of modules and of a package."""
    (tmp_path / "protlm").mkdir()
    for name in ("random", "yaml", "torch", "inspect", "threading", "protlm/__init__"):
        (tmp_path / f"{name}.py").write_text(BAD)
    return tmp_path


def run(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a command as its user does: without PYTHONPATH or PYTHONSAFEPATH."""
    without = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SLURM_"))}
    return subprocess.run(
        command,
        cwd=folder,
        env=without | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_command_that_replaces_itself_ignores_the_working_folder(
    command: str, with_foreign_modules: Path
) -> None:
    done = run(with_foreign_modules, PROTLM, command, "--help")
    assert done.returncode == 0, done.stderr
    assert f"Usage: protlm {command}" in done.stdout


@pytest.mark.parametrize("module", ["protlm", "protlm.train", "protlm.commands.evaluate"])
def test_a_module_that_is_run_by_hand_ignores_further_files(module: str, tmp_path: Path) -> None:
    """The first imports are Python's own, so it is only told apart after them."""
    for name in ("yaml", "torch", "typer", "hydra", "rich"):
        (tmp_path / f"{name}.py").write_text(BAD)
    done = run(tmp_path, sys.executable, "-m", module, "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage: protlm" in done.stdout


@pytest.mark.slow
def test_ranks_and_loader_workers_ignore_the_working_folder(
    with_foreign_modules: Path, tiny_settings: list[str]
) -> None:
    settings = ["run_dir=run", "trainer.devices=2", "trainer.max_steps=2", "data.num_workers=1"]
    done = run(with_foreign_modules, PROTLM, "train", *tiny_settings, *settings)
    assert done.returncode == 0, done.stderr
    assert "FOREIGN" not in done.stderr
    assert (with_foreign_modules / "run" / "checkpoints" / "latest").exists()
