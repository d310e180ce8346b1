"""A file that expands a thousandfold is rejected without filling memory."""

import gzip

import pytest

PROGRAM = """
splitting.BLOCK_BYTES = 4 << 20
try:
    prepare([Path(sys.argv[1])], Path(sys.argv[2]), split_rule=HashSplit(0, 0))
except Exception as error:
    print(error)
print(peak_megabytes())
"""


def test_a_line_of_200_mb_is_one_record_too_long(run_builder, tmp_path):
    path = tmp_path / "bomb.gz"
    line = gzip.compress(b"M" * (50 << 20), compresslevel=1)
    path.write_bytes(gzip.compress(b">bomb\n") + line * 4)
    message, megabytes = run_builder(PROGRAM, path, tmp_path / "data").stdout.splitlines()
    assert "1 longer than 100,000 residues" in message
    assert int(megabytes) < 300


@pytest.mark.slow
def test_more_than_a_gigabyte_of_nothing_is_stopped(run_builder, tmp_path):
    path = tmp_path / "bomb.gz"
    line = gzip.compress(b"M" * (64 << 20), compresslevel=1)
    # Sixty gigabytes, if it were read to its end.
    path.write_bytes(gzip.compress(b">bomb\n") + line * 1_000)
    message, megabytes = run_builder(PROGRAM, path, tmp_path / "data").stdout.splitlines()
    assert "expand more than 200-fold" in message
    assert int(megabytes) < 300
