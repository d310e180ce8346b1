"""Kills a process that saves checkpoints at 30 random moments: RUN; prints their number."""

import os
import random
import signal
import time

from protlm.checkpoints import format as checkpoints
from tests.faults.programs.saving import in_child, latest_step, leftovers, run, save


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
    os.waitpid(child, 0)
    is_partial = bool(leftovers())
    checkpoints.sweep(run)
    assert not leftovers()
    return is_partial


if __name__ == "__main__":
    save(1)
    rng, steps, killed_in_a_save = random.Random(0), [1], 0
    for _ in range(30):
        killed_in_a_save += kill_one(steps[-1], rng.uniform(0, 0.02))
        steps.append(latest_step())
    assert steps == sorted(set(steps))
    assert killed_in_a_save
    print(len(steps) - 1)
