"""Checkpoints of a run that children write, for the programs that kill them: RUN."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from protlm.checkpoints import format as checkpoints

run = Path(sys.argv[1])
folder = run / checkpoints.CHECKPOINTS
folder.mkdir(parents=True)


def save(step: int) -> None:
    """Writes the checkpoint of a step."""
    weight = torch.full((20_000,), float(step))
    contents = {"global_step": step, "state_dict": {"network.w": weight}}
    checkpoints.save_training(contents, folder / checkpoints.checkpoint_name(step))


def in_child(action: Callable[..., Any], *arguments: Any) -> int:
    """Forks a child that calls a function, and returns its process ID."""
    child = os.fork()
    if child == 0:
        action(*arguments)
        os._exit(0)
    return child


def latest_step() -> int:
    """Returns the step of the latest checkpoint, which is intact and the newest."""
    newest = checkpoints.latest(run)
    assert newest is not None
    found = checkpoints.load_training(newest)
    step = found["global_step"]
    assert (found["state_dict"]["network.w"] == step).all()
    assert checkpoints.newest_whole(run) == (newest, [])
    return step


def leftovers() -> list[str]:
    """Returns the names of incomplete files."""
    return [path.name for path in folder.iterdir() if path.suffix == ".part"]
