"""Builds a data set, with faults: SOURCE OUT [FAULT[=VALUE]...]; each is a function in `FAULTS`."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from protlm.data_prep import sources, split
from protlm.data_prep.encode import Encoder  # pyright: ignore[reportMissingImports]
from protlm.system import lock
from protlm.system.errors import exit_with_message
from tests.faults.programs.builder import build
from tests.faults.programs.file_size import limit_file_size

source, out, *faults = sys.argv[1:]
options: dict[str, Any] = {}


def as_nobody() -> None:
    """Becomes an unprivileged user, who fails when the input is read; root may write anywhere."""

    def refuse(*_: object) -> None:
        raise AssertionError("the input was read")

    sources.SequenceFile = refuse
    # The imports are done, and may be unreadable for the other user.
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)


def terminate(at: str) -> None:
    """Sends SIGTERM while a block is encoded."""
    encode, blocks = Encoder.__call__, []

    def encode_and_terminate(encoder: Encoder, block: Any) -> Any:
        blocks.append(block)
        if len(blocks) == int(at):
            os.kill(os.getpid(), signal.SIGTERM)
        return encode(encoder, block)

    Encoder.__call__ = encode_and_terminate


def kill_while_locking(where: str) -> None:
    """Kills at MODULE.FUNCTION:MODE, after the lock file was opened; mode `w` truncates it."""
    function, mode = where.split(":")
    module, name = function.split(".")

    def kill(*_: object, **__: object) -> None:
        next(Path(out).parent.rglob(lock.LOCK)).open(mode)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(getattr(lock, module), name, kill)


def in_quarters() -> None:
    """Splits by the first byte of the digest, and omits duplicates."""
    split.HashSplit.split_of = lambda self, record, digest: f"split_{digest[0] % 4}"
    options.update(deduplicate=True, shard_residues=1 << 28)


FAULTS: dict[str, Callable[..., None]] = {
    "largest_file": lambda size: limit_file_size(int(size)),
    "one_shard": lambda: options.update(shard_residues=1 << 28),
    "in_quarters": in_quarters,
    "as_nobody": as_nobody,
    "terminate": terminate,
    "kill_while_locking": kill_while_locking,
}

if __name__ == "__main__":
    for fault in faults:
        name, *values = fault.split("=")
        FAULTS[name](*values)
    exit_with_message(lambda: build([source], out, **options))
