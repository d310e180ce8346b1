"""Trains on ranks of which the second starts more than a second after the first: [SETTING...]."""

import time

from tests.faults.programs.rank import RANK, train

if __name__ == "__main__":
    time.sleep(1.3 * RANK)
    train("run")
