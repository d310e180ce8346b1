"""Writes to a pipe, other than standard output, whose reader has ended."""

import os

from protlm.system.errors import exit_with_message


def write() -> None:
    """Writes to a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    os.write(writer, b"to a worker that has ended")


if __name__ == "__main__":
    exit_with_message(write)
