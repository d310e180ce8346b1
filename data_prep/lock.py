"""One builder per output folder."""

import shutil
from pathlib import Path
from typing import final

from protlm.lock import LOCK, FolderLock


@final
class BuildLock(FolderLock):
    """The lock of a folder in which a data set or a cluster table is built."""

    doing = "being built"
    if_running = "wait for it, or choose another --out"
    if_gone = "type the same command with --break-lock"


def clear_folder(folder: Path, *, last: str = "") -> None:
    """Removes everything in a folder except its lock; the entry named `last` is removed last."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name == last):
        if entry.name != LOCK:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)
