"""Runs the command line on a disk that claims to be free: LARGEST_FILE ARGUMENT...

LARGEST_FILE is -1 for no limit on the size of files.
"""

import shutil
import sys
from types import SimpleNamespace

from protlm.cli.main import main
from tests.faults.programs.file_size import limit_file_size

if __name__ == "__main__":
    limit_file_size(int(sys.argv.pop(1)))
    shutil.disk_usage = lambda _: SimpleNamespace(free=1 << 60)
    main()
