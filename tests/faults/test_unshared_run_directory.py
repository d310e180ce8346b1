"""Nodes that do not see the same run directory would resume from different steps."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
from protlm.errors import UserError

train("run", "trainer.max_steps=2")
if number == 1:
    Path("elsewhere").mkdir()
    os.chdir("elsewhere")
try:
    print(json.dumps(train("run", "trainer.max_steps=4")))
except UserError as error:
    print(json.dumps(str(error)))
"""


def test_ranks_that_see_other_checkpoints_are_refused(
    run_ranks: Callable[..., list[str]], tmp_path: Path
) -> None:
    told = [json.loads(text.splitlines()[-1]) for text in run_ranks(tmp_path, PROGRAM)]
    assert told[0] == told[1]
    assert "rank 0 resumes from step 2, rank 1 from step 0" in told[0]
    assert "on a file system that all nodes see" in told[0]
