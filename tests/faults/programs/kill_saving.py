"""Kills processes that save checkpoints, at 30 random moments or at each call: RUN random|each.

Prints the steps of the latest checkpoint after each kill.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from protlm.checkpoints import checks
from protlm.checkpoints import format as checkpoints
from tests.faults.programs.kills import in_child, killed_at_each_call, status_of

# The calls by which a checkpoint reaches the disk.
CALLS = [
    (os, "fsync"),
    (Path, "replace"),
    (Path, "write_text"),
    (Path, "unlink"),
    (torch, "save"),
    (checks, "sha256_of"),
]
run = Path(sys.argv[1])
folder = run / checkpoints.CHECKPOINTS


def save(step: int) -> None:
    """Writes the checkpoint of a step."""
    weight = torch.full((20_000,), float(step))
    contents = {"global_step": step, "state_dict": {"network.w": weight}}
    checkpoints.save_training(contents, folder / checkpoints.checkpoint_name(step))


def latest_step() -> int:
    """Returns the step of the latest checkpoint, which is intact and the newest."""
    newest = checkpoints.latest(run)
    assert newest is not None
    found = checkpoints.load_training(newest)
    step = found["global_step"]
    assert (found["state_dict"]["network.w"] == step).all()
    assert checkpoints.newest_whole(run) == (newest, [])
    return step


def save_forever() -> None:
    """Saves checkpoints and removes old ones, until the parent ends."""
    step, parent = latest_step(), os.getppid()
    while os.getppid() == parent:
        step += 1
        save(step)
        for old in checkpoints.all_checkpoints(run)[:-2]:
            checkpoints.remove(old)


def kill_one(after: int, seconds: float) -> bool:
    """Kills a child some time after it has saved a step; returns whether a part was left."""
    child = in_child(save_forever)
    while True:
        newest = checkpoints.latest(run)
        if newest is not None and checkpoints.step_of(newest) != after:
            break
        time.sleep(0.005)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    status_of(child)
    is_partial = bool(list(folder.glob(".*.part")))
    checkpoints.sweep(run)
    assert not list(folder.glob(".*.part"))
    return is_partial


def at_random() -> list[int]:
    """Kills at random moments, some of which are in a save."""
    rng, steps, killed_in_a_save = random.Random(0), [1], 0
    for _ in range(30):
        killed_in_a_save += kill_one(steps[-1], rng.uniform(0, 0.02))
        steps.append(latest_step())
    assert steps == sorted(set(steps))
    assert killed_in_a_save
    return steps[1:]


def at_each_call() -> list[int]:
    """Kills at each call; the second checkpoint is saved again where it was left, and removed."""
    seen = []
    for _ in killed_at_each_call(CALLS, save, 2):
        seen.append(latest_step())
        assert status_of(in_child(save, 2)) == 0 and latest_step() == 2
        for path in folder.iterdir():
            if path.name.startswith("step-00000002") or path.suffix == ".part":
                path.unlink()
        checkpoints.set_latest(folder / checkpoints.checkpoint_name(1))
    return seen


if __name__ == "__main__":
    folder.mkdir(parents=True)
    save(1)
    print(json.dumps(at_random() if sys.argv[2] == "random" else at_each_call()))
