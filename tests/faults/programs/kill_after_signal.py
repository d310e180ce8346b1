"""Kills a run a moment after a signal, and resumes it each time: TURNS [SETTING...].

Prints the exit codes.
"""

import json
import os
import random
import signal
import sys
import time

from tests.faults.programs.forked_run import exit_code_of, start, wait_for_step

SETTINGS = (
    "trainer.max_steps=1000000",
    "trainer.log_every=1",
    "trainer.checkpoint_every=3",
    "trainer.valid_every=5",
)

if __name__ == "__main__":
    turns, rng, codes = int(sys.argv.pop(1)), random.Random(0), []
    for turn in range(turns):
        pid = start("run", *SETTINGS)
        wait_for_step("run", 4 * turn + 2)
        os.kill(pid, signal.SIGUSR1)
        time.sleep(rng.uniform(0, 0.08))
        os.kill(pid, signal.SIGKILL)
        codes.append(exit_code_of(pid))
    print(json.dumps(codes))
