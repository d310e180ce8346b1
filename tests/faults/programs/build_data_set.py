"""Builds a data set: SOURCE OUT [LARGEST_FILE]."""

import sys

from protlm.errors import exit_with_message
from tests.faults.programs.builder import build
from tests.faults.programs.file_size import limit_file_size

if __name__ == "__main__":
    source, out, *limits = sys.argv[1:]
    for limit in limits:
        limit_file_size(int(limit))
    exit_with_message(lambda: build([source], out))
