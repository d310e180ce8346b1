"""The entry point `python -m protlm.train`, which launchers also run for the other ranks."""

import os
import signal
import threading
import time

from protlm.system.processes import ignore_modules_of_working_folder

_SECONDS = 1.0


def end_with_parent() -> None:
    """Ends this process when its parent ends, if the parent is Lightning's launcher.

    Lightning ends its ranks when one of them fails, but not when it is killed itself. torchrun
    ends its ranks and SLURM, which does not use `LOCAL_RANK`, its tasks.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0" and "TORCHELASTIC_RUN_ID" not in os.environ:
        threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS)
    os._exit(1)


def main() -> None:
    """Runs `protlm train` with the arguments of this process."""
    from protlm.commands.train import main as run

    run()


if __name__ == "__main__":
    # The import in `main` takes seconds; until then Ctrl-C ends the process without a traceback.
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    ignore_modules_of_working_folder()
    end_with_parent()
    main()
