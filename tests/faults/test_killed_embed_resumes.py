"""An `embed` killed by SIGKILL at random moments continues to the same bytes."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "kill_embeddings.py"


@pytest.mark.slow
def test_a_killed_embed_continues_to_the_same_bytes(
    run_builder: Callable[..., "subprocess.CompletedProcess[str]"],
    proteins: Path,
    tiny_run: Path,
    tmp_path: Path,
) -> None:
    done = run_builder(PROGRAM, proteins, tiny_run, tmp_path, 10, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["killed"] == 10
    assert "batches are finished" in done.stderr
