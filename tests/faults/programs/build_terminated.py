"""Builds a data set, and receives SIGTERM while it encodes the 20th block: SOURCE OUT."""

import os
import signal
import sys
from typing import Any

from protlm.data_prep.encode import Encoder  # pyright: ignore[reportMissingImports]
from protlm.errors import exit_with_message
from tests.faults.programs.builder import build

encode = Encoder.__call__
blocks: list[Any] = []


def encode_and_terminate(encoder: Encoder, block: Any) -> Any:
    """Encodes a block; sends the signal before the 20th."""
    blocks.append(block)
    if len(blocks) == 20:
        os.kill(os.getpid(), signal.SIGTERM)
    return encode(encoder, block)


if __name__ == "__main__":
    Encoder.__call__ = encode_and_terminate
    exit_with_message(lambda: build([sys.argv[1]], sys.argv[2]))
