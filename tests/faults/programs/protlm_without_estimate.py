"""Runs the command line with an estimate of 0 bytes for embeddings: LARGEST_FILE ARGUMENT...

LARGEST_FILE is -1 for no limit on the size of files.
"""

import sys

import protlm.commands.embed
from protlm.cli import main
from tests.faults.programs.file_size import limit_file_size

if __name__ == "__main__":
    limit_file_size(int(sys.argv.pop(1)))
    protlm.commands.embed.entry_bytes = lambda *_: 0
    main()
