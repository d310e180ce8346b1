"""Resumes the run `two-to-four` on other ranks: [SETTING...]."""

from tests.faults.programs.interrupted_rank import start

if __name__ == "__main__":
    start("two-to-four", [])
