"""`protlm train --multirun` with Hydra's submitit launcher, on this machine."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from protlm.checkpoints.format import latest


def sweep(folder: Path, env: Mapping[str, str], *settings: str) -> subprocess.CompletedProcess[str]:
    """Runs a sweep over two seeds: a job and a run for each."""
    launched = ["--multirun", "hydra/launcher=submitit_local", "seed=0,1"]
    return subprocess.run(
        [sys.executable, "-m", "protlm", "train", *launched, *settings],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )


@pytest.mark.slow
def test_each_run_is_a_job(
    tiny_settings: list[str], one_process: dict[str, str], tmp_path: Path
) -> None:
    settings = [*tiny_settings, "trainer.max_steps=2", "schedule.warmup_steps=1"]
    done = sweep(tmp_path, one_process, *settings, f"run_dir={tmp_path}/run-${{seed}}")
    assert done.returncode == 0, done.stderr
    for seed in (0, 1):
        newest = latest(tmp_path / f"run-{seed}")
        assert newest is not None and newest.name == "step-00000002.ckpt"
        assert f"seed: {seed}\n" in (tmp_path / f"run-{seed}" / "config.yaml").read_text()
    # A failed job is reported with its exit code.
    wrong = ["data.dir=nothing", f"run_dir={tmp_path}/other-${{seed}}"]
    failed = sweep(tmp_path, one_process, *settings, *wrong)
    assert failed.returncode == 3
    assert "nothing has no manifest.json" in failed.stderr.splitlines()[-1]
