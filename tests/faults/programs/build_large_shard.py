"""Builds a data set of one shard: SOURCE OUT [LARGEST_FILE]."""

import sys
from pathlib import Path

from protlm.data_prep import prepare, split
from protlm.errors import exit_with_message
from tests.faults.programs.file_size import limit_file_size


def build_large(source: str, out: str) -> None:
    """Builds a data set in shards of the usual size."""
    prepare.prepare([Path(source)], Path(out), split_rule=split.HashSplit(0, 0))


if __name__ == "__main__":
    source, out, *limits = sys.argv[1:]
    for limit in limits:
        limit_file_size(int(limit))
    exit_with_message(lambda: build_large(source, out))
