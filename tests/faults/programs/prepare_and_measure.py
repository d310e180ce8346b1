"""Prepares a file in blocks of the usual size: SOURCE OUT [MAX_REJECT_RATE].

Prints the message of an error, if there is one, and the peak of the memory in MB.
"""

import sys
from pathlib import Path

from protlm.data.records import block
from protlm.data_prep import prepare, split
from protlm.system.errors import UserError
from tests.faults.programs.builder import peak_megabytes

if __name__ == "__main__":
    source, out, *rates = sys.argv[1:]
    block.BLOCK_BYTES = 4 << 20
    options = prepare.PrepareOptions(max_reject_rate=float(rates[0]) if rates else 0.01)
    try:
        rule = split.HashSplit(0, 0)
        prepare.prepare([Path(source)], Path(out), split_rule=rule, options=options)
    except UserError as error:
        print(error)
    print(peak_megabytes())
