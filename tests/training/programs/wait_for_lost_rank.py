"""Waits as rank 0 does in a collective, for ranks of which one was terminated: trick|none."""

import os
import subprocess
import sys
import time

from lightning_fabric.strategies.launchers.subprocess_script import _ChildProcessObserver

from protlm.training.lightning_internals import end_with_exit_code_of_ranks

if __name__ == "__main__":
    if sys.argv[1] == "trick":
        end_with_exit_code_of_ranks()
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    ranks = [subprocess.Popen(sleep), subprocess.Popen(sleep)]
    ranks[1].terminate()
    observer = _ChildProcessObserver(
        main_pid=os.getpid(),
        child_processes=ranks,
        sleep_period=0.1,  # pyright: ignore[reportArgumentType]
    )
    observer.start()
    time.sleep(60)
