"""Writes a part of a file that is completed a minute later: FILE."""

import sys
import time
from pathlib import Path

from protlm.system.paths import complete_file

if __name__ == "__main__":
    with complete_file(Path(sys.argv[1])) as file:
        file.write_text("a part")
        print("written", flush=True)
        time.sleep(60)
