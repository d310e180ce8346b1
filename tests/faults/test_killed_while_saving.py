"""When a process is killed while it writes a checkpoint, `latest` still names an intact one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

# One process pays for the imports; its children do the saving and are killed.
PROGRAM = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from protlm.checkpoints import format as checkpoints

run = Path(sys.argv[1])
folder = run / checkpoints.CHECKPOINTS
folder.mkdir(parents=True)

def contents(step):
    return {"global_step": step, "state_dict": {"network.w": torch.full((20_000,), float(step))}}

def save(step):
    checkpoints.save_training(contents(step), folder / checkpoints.checkpoint_name(step))

def in_a_child(action):
    child = os.fork()
    if child == 0:
        action()
        os._exit(0)
    return child

def latest_step():
    found = checkpoints.load_training(checkpoints.latest(run))
    step = found["global_step"]
    assert (found["state_dict"]["network.w"] == step).all()
    whole, faults = checkpoints.newest_whole(run)
    assert (whole, faults) == (checkpoints.latest(run), [])
    return step

def leftovers():
    return [path.name for path in folder.iterdir() if path.suffix == ".part"]
"""

AT_RANDOM = """
def save_for_ever():
    step, parent = latest_step(), os.getppid()
    while os.getppid() == parent:
        step += 1
        save(step)
        for old in checkpoints.all_checkpoints(run)[:-2]:
            checkpoints.remove(old)

save(1)
rng, steps, killed_in_a_save = random.Random(0), [1], 0
for _ in range(30):
    child = in_a_child(save_for_ever)
    while checkpoints.step_of(checkpoints.latest(run)) == steps[-1]:
        time.sleep(0.005)
    time.sleep(rng.uniform(0, 0.02))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    killed_in_a_save += bool(leftovers())
    checkpoints.sweep(run)
    assert not leftovers()
    steps.append(latest_step())
assert steps == sorted(set(steps))
assert killed_in_a_save
print(len(steps) - 1)
"""

# What reaches the disk does so by these calls. `after` and `before` the n-th the process is killed.
AT_EACH_CALL = """
from protlm import paths
from protlm.checkpoints import checksums as sums

def kill_at(number, when):
    count = 0
    def wrap(owner, name):
        real = getattr(owner, name)
        def call(*arguments, **named):
            nonlocal count
            count += 1
            if (count, when) == (number, "before"):
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*arguments, **named)
            if (count, when) == (number, "after"):
                os.kill(os.getpid(), signal.SIGKILL)
            return result
        setattr(owner, name, call)
    for owner, name in (
        (os, "fsync"), (Path, "replace"), (Path, "write_text"), (Path, "unlink"),
        (torch, "save"), (sums, "sha256_of"),
    ):
        wrap(owner, name)

def kill_in_save(number, when):
    kill_at(number, when)
    save(2)

save(1)
seen = []
for when in ("before", "after"):
    for number in range(1, 100):
        child = in_a_child(lambda: kill_in_save(number, when))
        status = os.waitpid(child, 0)[1]
        seen.append(latest_step())
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        # From whatever is left the next one saves the same step.
        child = in_a_child(lambda: save(2))
        assert os.waitpid(child, 0)[1] == 0 and latest_step() == 2
        for path in folder.iterdir():
            if path.name.startswith("step-00000002") or path.suffix == ".part":
                path.unlink()
        checkpoints.set_latest(folder / checkpoints.checkpoint_name(1))
print(len(seen), set(seen) == {1, 2})
"""


def run_program(program: str, run: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM + program, run],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_killed_at_30_moments(tmp_path: Path) -> None:
    assert run_program(AT_RANDOM, tmp_path / "run") == "30"


def test_killed_before_and_after_each_call(tmp_path: Path) -> None:
    calls, is_both = run_program(AT_EACH_CALL, tmp_path / "run").split()
    assert int(calls) > 20
    assert is_both == "True"
