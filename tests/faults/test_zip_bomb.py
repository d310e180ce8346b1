"""A file that expands a thousandfold is rejected in bounded memory."""

import gzip
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "prepare_and_measure.py"


@pytest.fixture
def prepare_lines(run_builder, tmp_path):
    """Prepares a line that is repeated in a gzip file; returns the message and the peak in MB."""

    def run(megabytes, repeats):
        path = tmp_path / "bomb.gz"
        line = gzip.compress(b"M" * (megabytes << 20), compresslevel=1)
        path.write_bytes(gzip.compress(b">bomb\n") + line * repeats)
        message, peak = run_builder(PROGRAM, path, tmp_path / "data").stdout.splitlines()
        return message, int(peak)

    return run


def test_a_line_of_200_mb_is_one_record_too_long(prepare_lines):
    message, megabytes = prepare_lines(50, 4)
    assert "1 longer than 100,000 residues" in message
    assert megabytes < 300


@pytest.mark.slow
def test_a_file_that_expands_more_than_200_fold_is_rejected(prepare_lines):
    """It would be 60 GB if it were read to its end."""
    message, megabytes = prepare_lines(64, 1_000)
    assert "expand more than 200-fold" in message
    assert megabytes < 300
