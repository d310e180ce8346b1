"""Resumes a run whose directory rank 1 does not see: [SETTING...]; prints the error."""

import json
import os
from pathlib import Path

from protlm.system.errors import UserError
from tests.faults.programs.rank import RANK, train

if __name__ == "__main__":
    train("run", "trainer.max_steps=2")
    if RANK == 1:
        Path("elsewhere").mkdir()
        os.chdir("elsewhere")
    try:
        print(json.dumps(train("run", "trainer.max_steps=4")))
    except UserError as error:
        print(json.dumps(str(error)))
