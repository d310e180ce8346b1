"""One builder to an output."""

from typing import final

from protlm.lock import FolderLock


@final
class BuildLock(FolderLock):
    """The lock of a folder in which something is built."""

    doing = "being built"
    if_running = "wait for it, or choose another --out"
    if_gone = "type the same command with --break-lock"
