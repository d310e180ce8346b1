"""Locks a folder until standard input ends: FOLDER."""

import sys
from pathlib import Path

from protlm.system.lock import FolderLock

if __name__ == "__main__":
    lock = FolderLock(Path(sys.argv[1]), "being trained", "run_dir=")
    print(flush=True)
    sys.stdin.read()
