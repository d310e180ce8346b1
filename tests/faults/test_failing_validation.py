"""A validation that fails ends its run, also with loader workers."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest

from protlm.system.errors import ExitCode


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_validation_shard_that_goes_away_ends_the_run(
    ranks: int,
    tiny_data: Path,
    tiny_settings: list[str],
    one_process: dict[str, str],
    tmp_path: Path,
    wait_for_step: Callable[..., None],
) -> None:
    """With one sentence and its exit code; not even an idle worker is waited for."""
    data = copytree(tiny_data, tmp_path / "data")
    settings = ["run_dir=run", f"data.dir={data}", "data.num_workers=1", "trainer.log_every=1"]
    settings += ["trainer.max_steps=100000", "trainer.valid_every=30", f"trainer.devices={ranks}"]
    command = [sys.executable, "-m", "protlm.train", *tiny_settings, *settings]
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(command, cwd=tmp_path, env=one_process, stdout=log, stderr=log)
    try:
        wait_for_step(tmp_path / "run", 1, run)
        shard = next((data / "valid").iterdir())
        shard.rename(tmp_path / "elsewhere.h5")
        code = run.wait(timeout=120)
    finally:
        run.kill()
    said = (tmp_path / "log").read_text()
    assert code == ExitCode.BAD_INPUT, said
    assert f"protlm: the shard {shard} is missing" in said
    assert "Traceback" not in said
