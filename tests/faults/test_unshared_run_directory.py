"""Nodes that do not see the same run directory would resume from different steps."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "change_directory.py"

pytestmark = pytest.mark.slow


def test_ranks_that_see_other_checkpoints_are_refused(
    run_ranks: Callable[..., list[str]], tmp_path: Path
) -> None:
    told = [json.loads(text.splitlines()[-1]) for text in run_ranks(tmp_path, PROGRAM)]
    assert told[0] == told[1]
    assert "rank 0 resumes from step 2, rank 1 from step 0" in told[0]
    assert "on a file system that all nodes see" in told[0]
