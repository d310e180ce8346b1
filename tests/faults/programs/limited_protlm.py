"""Runs the command line with a limit on the size of files: LARGEST_FILE ARGUMENT..."""

import sys

from protlm.cli.main import main
from tests.faults.programs.file_size import limit_file_size

if __name__ == "__main__":
    limit_file_size(int(sys.argv.pop(1)))
    main()
