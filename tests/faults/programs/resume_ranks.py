"""Interrupts runs of two ranks in many ways: STEPS MOVED_AT HARD PLAIN [SETTING...].

HARD and PLAIN are lists of settings in JSON. `whole` is not interrupted, `killed` is killed after
each of its steps; `one-to-two` exists; `two-to-others` is killed after step MOVED_AT. The disk is
full in the other three, whose ends are printed.
"""

import json
import sys

from tests.faults.programs.interrupted_rank import start

SHORT = ("trainer.max_steps=4", "trainer.checkpoint_every=1", "trainer.valid_every=9")

if __name__ == "__main__":
    steps, moved_at, hard, plain = (json.loads(sys.argv.pop(1)) for _ in range(4))
    start("whole", hard)
    for step in range(1, steps + 1):
        start("killed", hard, killed=step)
    start("killed", hard)
    start("one-to-two", plain)
    start("two-to-others", plain, killed=moved_at)
    stopped = [*SHORT, "trainer.on_save_error=stop"]
    ends = [
        start("warned", SHORT, full=2),
        start("stopped", stopped, full=2),
        start("at-the-end", SHORT, full=4),
    ]
    print(json.dumps(ends))
