"""Runs the command line with a limit on the size of files: LARGEST_FILE ARGUMENT..."""

import resource
import sys

from protlm.cli import main

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)), resource.RLIM_INFINITY))
    main()
