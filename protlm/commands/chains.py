"""The chain of a structure file that `protlm contacts` and `protlm inspect` use."""

import sys
from pathlib import Path

from protlm.analysis.structures import Structure, read_structure
from protlm.system.terminal import printable


def read_chain(path: Path, chain: str | None) -> Structure:
    """Reads a chain; prints its notes, and which of several is used if none is given."""
    structure = read_structure(path, chain)
    if chain is None and structure.other_chains:
        others = ", ".join(structure.other_chains)
        message = f"{path}: chain {structure.chain} is used; --chain takes another: {others}"
        print(printable(message), file=sys.stderr)
    for note in structure.notes:
        print(printable(f"{path}, {note}"), file=sys.stderr)
    return structure
