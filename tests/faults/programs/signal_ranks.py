"""Sends signals to ranks at random moments, and resumes the run each time: TURNS [SETTING...].

Prints the ends of all starts, and that of a run to the same step without a signal. The ranks draw
the same moments: a while after the first step of each start, wherever they are by then.
"""

import json
import os
import random
import signal
import sys
import threading
from typing import Any

from protlm.training.module import LanguageModeling
from tests.faults.programs.rank import RANK, train

SENT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
SETTINGS = ("trainer.valid_every=7", "trainer.log_every=5", "trainer.keep_checkpoints=500")
original = LanguageModeling.training_step
# The signal to each rank that receives one, the first step of this start, and the seconds after.
signals: dict[int, signal.Signals] = {}
first, wait = 0, 0.0


def training_step(self: LanguageModeling, batch: Any, batch_index: int) -> Any:
    """Starts the clock of a signal in the first step."""
    if self.trainer.global_step == first and RANK in signals:
        threading.Timer(wait, os.kill, [os.getpid(), signals[RANK]]).start()
    return original(self, batch, batch_index)


def main() -> None:
    """Trains until a signal, as many times as is asked for."""
    global first, wait, signals
    turns, rng, ended = int(sys.argv.pop(1)), random.Random(0), []
    LanguageModeling.training_step = training_step
    for turn in range(turns):
        number = rng.choice(SENT)
        signals = dict.fromkeys([[0], [1], [0, 1]][turn % 3], number)
        wait = rng.uniform(0, 0.2)
        ended.append(train("run", *SETTINGS, "trainer.max_steps=1000000"))
        first = ended[-1][0]
    signals = {}
    whole = train("whole", *SETTINGS, f"trainer.max_steps={first}")
    print(json.dumps([ended, whole]))


if __name__ == "__main__":
    main()
