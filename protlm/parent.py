"""A rank that Lightning's launcher started does not outlive the launcher, which is rank 0."""

import os
import threading
import time

_SECONDS = 1.0


def end_with_parent() -> None:
    """Ends this process when its parent ends, if the parent is Lightning's launcher.

    Lightning ends its ranks when one of them fails, but cannot when it is killed itself. torchrun
    looks after its ranks, and SLURM, which does not count them by `LOCAL_RANK`, after its tasks.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0" and "TORCHELASTIC_RUN_ID" not in os.environ:
        threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS)
    os._exit(1)
