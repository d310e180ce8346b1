"""Prepares standard input with a small table of digests in memory: OUT WORKERS.

Prints the peak of the resident memory, in KiB.
"""

import re
import sys
from functools import partial
from pathlib import Path

from protlm.data_prep import prepare, split  # pyright: ignore[reportAttributeAccessIssue]

if __name__ == "__main__":
    out, workers = sys.argv[1:]
    prepare.DigestSet = partial(prepare.DigestSet, memory_slots=1 << 16)
    options = prepare.PrepareOptions(
        shard_residues=10_000_000, workers=int(workers), deduplicate=True
    )
    rule = split.HashSplit(0.01, 0.01)
    prepare.prepare([Path("-")], Path(out), split_rule=rule, options=options)
    (peak,) = re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    print(peak)
