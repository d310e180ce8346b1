"""A reader of standard error that ends, or a full disk for a log, does not end a command."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from protlm.checkpoints.format import all_checkpoints
from protlm.paths import sample_dir
from tests.marks import slow_but

PROGRAM = Path(__file__).parent / "programs" / "write_to_closed_pipe.py"
TINY_FASTA = sample_dir() / "uniprot_tiny.fasta.gz"

# Redirections of standard error: its reader ends at once or after two lines, its disk is full, or
# it is closed.
LOSSES = {
    "no reader": "2> >(exec true)",
    "a reader of two lines": "2> >(head -2 >/dev/null)",
    "a full disk": "2>/dev/full",
    "closed": "2>&-",
    "both closed": ">&- 2>&-",
    "no reader of both": "> >(exec true) 2>&1",
}

Shell = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def shell(one_process: dict[str, str], tmp_path: Path) -> Shell:
    """Runs `protlm ARGUMENTS...` with a redirection; the readers end before it starts."""

    def run(arguments: str, redirection: str) -> "subprocess.CompletedProcess[str]":
        command = f"{{ sleep 0.3; exec {sys.executable} -m protlm {arguments}; }} {redirection}"
        return subprocess.run(
            ["bash", "-c", f"( {command} ); exit $?"],
            cwd=tmp_path,
            env=one_process,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_embed_completes(loss: str, shell: Shell, tiny_run: Path, tmp_path: Path) -> None:
    done = shell(f"embed {TINY_FASTA} -m {tiny_run} -o out.h5", LOSSES[loss])
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.h5"]
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("loss", slow_but(["no reader", "closed", "a full disk"], "no reader"))
def test_prepare_completes(loss: str, shell: Shell, tmp_path: Path) -> None:
    done = shell(f"prepare {TINY_FASTA} --out data", LOSSES[loss])
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "data" / "manifest.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["no reader of both", "closed"])
def test_train_completes(loss: str, shell: Shell, tiny_settings: list[str], tmp_path: Path) -> None:
    settings = [*tiny_settings, "run_dir=run", "trainer.max_steps=3", "trainer.log_every=1"]
    done = shell(f"train {' '.join(settings)}", LOSSES[loss])
    assert done.returncode == 0, done.stderr
    assert [path.name for path in all_checkpoints(tmp_path / "run")][-1] == "step-00000003.ckpt"


@pytest.mark.slow
def test_a_failure_keeps_its_exit_code_without_a_reader(shell: Shell, tmp_path: Path) -> None:
    for loss in LOSSES.values():
        assert shell("data info nothing", loss).returncode == 3, loss
    assert not list(tmp_path.iterdir())


def test_a_pipe_to_another_process_is_not_standard_output(one_process: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, PROGRAM], capture_output=True, text=True, env=one_process, check=False
    )
    assert done.returncode == 1
    assert "internal error" in done.stderr
