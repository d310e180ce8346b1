"""Prints the process IDs of two workers, a line per item, until it is killed or interrupted."""

import os
import signal
import time

from protlm.system.errors import exit_with_message
from protlm.system.interruption import sigterm_as_interrupt
from protlm.system.shares import in_order


def work(number: int) -> int:
    time.sleep(0.05)
    return os.getpid()


def print_ids() -> None:
    with sigterm_as_interrupt():
        for _, pid in in_order(work, ((i, i) for i in range(10_000)), 2):
            print(pid, flush=True)


if __name__ == "__main__":
    # A shell makes the processes that it starts in the background ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    exit_with_message(print_ids)
