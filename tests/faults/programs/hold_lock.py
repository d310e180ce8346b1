"""Locks a folder until standard input ends: FOLDER."""

import sys
from pathlib import Path

from protlm.lock import FolderLock

if __name__ == "__main__":
    lock = FolderLock(Path(sys.argv[1]))
    print(flush=True)
    sys.stdin.read()
