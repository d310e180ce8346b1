"""An empty file is bad input, and leaves no output."""

import gzip

import pytest


@pytest.mark.parametrize(
    "content", [b"", b"\n\n\n", b" \t\r\n", gzip.compress(b"", mtime=0), b"\xef\xbb\xbf"]
)
def test_an_empty_file_is_refused(refuse_bytes, content):
    assert "line 1: the file is empty" in refuse_bytes(content)


def test_a_file_without_a_valid_record_is_refused(refuse_bytes):
    assert "none of the 2 records can be used: 2 blank sequence" in refuse_bytes(b">a\n>b\n")


def test_the_command_ends_with_3(protlm_in_process, tmp_path):
    (tmp_path / "empty.fasta").touch()
    done = protlm_in_process("prepare", "empty.fasta", "--out", "data", cwd=tmp_path)
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["empty.fasta"]
