"""A rank that never comes: the others give up, all end, and the log says where each stood."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = """
import os, sys, time
from protlm.train import end_with_parent
end_with_parent()
import protlm.commands.train as command
from protlm.training.module import LanguageModeling
from pathlib import Path
from pytorch_lightning.strategies import DDPStrategy

# The time-out holds for the start too, and on a busy machine a rank may be long in coming.
set_up = DDPStrategy.setup_environment

def setup_environment(self):
    if os.environ.get("LOCAL_RANK", "0") == "1":
        Path("ready").touch()
    while not Path("ready").exists():
        time.sleep(0.05)
    set_up(self)

DDPStrategy.setup_environment = setup_environment
work = LanguageModeling.training_step

def sleep_for_ever():
    Path("sleeper").write_text(str(os.getpid()))
    time.sleep(1000)

def training_step(self, batch, index):
    if index == 3 and self.global_rank == int(os.environ["SLEEPER"]):
        sleep_for_ever()
    return work(self, batch, index)

LanguageModeling.training_step = training_step
command.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("sleeper", [0, 1])
def test_the_time_out_ends_all_ranks(
    sleeper: int,
    one_process: dict[str, str],
    tiny_settings: list[str],
    tmp_path: Path,
    assert_gone: Callable,
) -> None:
    """Under Lightning's own launcher, where rank 0 has started rank 1."""
    program = tmp_path / "protlm_train.py"
    program.write_text(PROGRAM)
    settings = [*tiny_settings, "run_dir=run", "trainer.devices=2", "trainer.timeout_minutes=0.2"]
    done = subprocess.run(
        [sys.executable, program, *settings, "trainer.max_steps=100"],
        cwd=tmp_path,
        env={**one_process, "SLEEPER": str(sleeper)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode != 0
    # The stack of the one that sleeps, and of the one that waits for it.
    assert "in sleep_for_ever" in done.stderr
    assert "in all_reduce" in done.stderr or "_engine_run_backward" in done.stderr
    waiting = 1 - sleeper
    assert f"rank {waiting} has lost another rank" in done.stderr
    assert "trainer.timeout_minutes=0.2" in done.stderr
    assert "internal error" not in done.stderr
    assert_gone(int((tmp_path / "sleeper").read_text()))
