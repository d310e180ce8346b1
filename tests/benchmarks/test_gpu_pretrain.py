"""Pretraining in commands of nine minutes: a run that is stopped says so, and continues."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from protlm.checkpoints.format import latest

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "model.num_layers=1",
    "model.num_heads=2",
    "model.model_dim=16",
    "model.feedforward_dim=16",
    "model.max_length=128",
    "data.max_length=128",
    "data.sampling=uniform",
    "data.tokens_per_batch=1024",
    "data.num_workers=0",
    "schedule.warmup_steps=1",
    "trainer.accelerator=cpu",
    "trainer.compile=false",
)


def script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "benchmarks" / "gpu_pretrain.sh", *arguments],
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_run_is_stopped_at_the_limit_and_continued(tiny_data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    given = ("performer_relu", str(tiny_data), str(tiny_data), str(run), *SMALL)
    stopped = script(*given, STEPS="1000000", LIMIT="25")
    assert stopped.returncode == 75, stopped.stderr
    assert "the same command continues" in stopped.stderr
    checkpoint = latest(run)
    assert checkpoint is not None
    reached = int(checkpoint.stem.removeprefix("step-"))
    done = script(*given, STEPS=str(reached + 2))
    assert done.returncode == 0, done.stderr
    assert f"is complete at step {reached + 2}" in done.stderr


def test_missing_arguments_are_named() -> None:
    done = script("performer_relu")
    assert done.returncode == 2
    assert "ATTENTION DATA VALID RUN" in done.stderr
