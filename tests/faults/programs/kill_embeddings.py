"""Kills `embed` at random moments until it was killed a number of times: FASTA RUN FOLDER KILLS.

One process imports everything and forks the commands, so that their time is spent on embedding.
Prints the number of killed commands, and the batches that the last of them had finished.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from protlm.commands.embed import embed
from protlm.commands.embedding.options import EmbedOptions
from protlm.errors import exit_with_message
from protlm.model.pooling import Pooling

fasta, run, folder, kills = (*map(Path, sys.argv[1:4]), int(sys.argv[4]))
OPTIONS = EmbedOptions(include=(Pooling.mean, Pooling.max), tokens_per_batch=1_024)


def start(output: Path) -> int:
    """Forks a command, and returns its process ID."""
    pid = os.fork()
    if pid == 0:
        exit_with_message(lambda: embed(fasta, run, output, OPTIONS))
    return pid


def main() -> None:
    """Kills commands, and compares the last output with that of an undisturbed command."""
    torch.set_num_threads(1)
    random.seed(0)
    whole, output = folder / "whole.h5", folder / "out.h5"
    began = time.monotonic()
    assert os.waitpid(start(whole), 0)[1] == 0
    seconds, killed = time.monotonic() - began, 0
    while killed < kills:
        pid = start(output)
        # Later commands have less to do, and are killed sooner.
        time.sleep(random.uniform(0, seconds * 2 / kills))
        os.kill(pid, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        if output.exists():
            output.unlink()
    parts = list(folder.glob("out.h5.partial/*.part"))
    assert os.waitpid(start(output), 0)[1] == 0
    assert output.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == ["out.h5", "whole.h5"]
    print(json.dumps({"killed": killed, "seconds": seconds, "units": len(parts)}))


if __name__ == "__main__":
    main()
