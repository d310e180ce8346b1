"""Kills a command at random moments until it was killed KILLS times: build|embed KILLS FOLDER ...

... is SOURCE [TABLE] for `build`, FASTA RUN for `embed`. One process imports everything and forks
the commands, so that their time is spent on the work; a command dies with its workers. The output
is compared with that of a command that was not interrupted.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

from protlm.commands.embed import embed
from protlm.commands.embedding.options import EmbedOptions
from protlm.model.pooling import Pooling
from protlm.system.errors import exit_with_message
from tests.faults.programs.builder import build, contents
from tests.faults.programs.kills import in_child, status_of

OPTIONS = EmbedOptions(include=(Pooling.mean, Pooling.max), tokens_per_batch=1_024)
# What a finished part of the work is called.
PARTS = {"build": "journal/segment-*.json", "embed": "*.vectors"}
command, kills, folder, *inputs = sys.argv[1:]
whole, out, partial = (Path(folder) / name for name in ("whole", "out", "out.partial"))
if command == "embed":
    whole, out, partial = (path.with_name(f"{path.name}.h5") for path in (whole, out, out))
    partial = out.with_name("out.h5.partial")


def start(workers: int, output: Path = out) -> int:
    """Forks a command, and returns its process ID."""

    def work() -> None:
        if command == "build":
            build(inputs[:1], output, *inputs[1:], workers=workers, deduplicate=True)
        else:
            embed(Path(inputs[0]), Path(inputs[1]), output, OPTIONS)

    return in_child(exit_with_message, work)


def finished() -> int:
    """Returns the number of finished parts."""
    return len(list(partial.glob(PARTS[command])))


def kill_at_random(killed: int, seconds: float) -> int:
    """Starts a command, kills its process group, and returns its exit status."""
    before = finished()
    pid = start(workers=random.choice([1, 2]))
    # Every other command finishes some parts, however slow the machine is.
    wanted = before + killed % 2 * random.choice([1, 3])
    while finished() < wanted:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
        time.sleep(0.001)
    time.sleep(random.uniform(0, 0.2 * seconds))
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return status_of(pid)


def compare() -> None:
    """Compares the output, and removes it."""
    assert contents(out) == contents(whole)
    shutil.rmtree(out) if out.is_dir() else out.unlink()


def main() -> None:
    """Kills commands, and prints how many, and the parts that each had finished."""
    torch.set_num_threads(1)
    random.seed(int(kills))
    began, kept = time.monotonic(), []
    assert status_of(start(1, whole)) == 0
    seconds = time.monotonic() - began
    while len(kept) < int(kills):
        if kill_at_random(len(kept), seconds):
            kept.append(finished())
        if out.exists():
            compare()
    assert status_of(start(1)) == 0
    compare()
    assert [path.name for path in Path(folder).iterdir()] == [whole.name]
    print(json.dumps(kept))


if __name__ == "__main__":
    main()
