"""Prepares a file in blocks of the usual size: SOURCE OUT.

Prints the message of an error or the rejected records, and the peak of the memory in MB.
"""

import json
import sys
from pathlib import Path

from protlm.data_prep import prepare, split
from protlm.system.errors import UserError


def peak_megabytes() -> int:
    """Returns the peak of this process's memory: getrusage includes the parent before the fork."""
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x]
    return int(line.split()[1]) // 1024


if __name__ == "__main__":
    source, out = map(Path, sys.argv[1:])
    options = prepare.PrepareOptions(max_reject_rate=1)
    try:
        prepare.prepare([source], out, split_rule=split.HashSplit(0, 0), options=options)
        print(json.loads((out / "report.json").read_text())["counts"]["rejected"])
    except UserError as error:
        print(error)
    print(peak_megabytes())
