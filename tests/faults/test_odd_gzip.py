"""Gzip files with several members, trailing zeros or garbage, or a wrong name."""

import gzip
import re

import pytest

FIRST, SECOND = b">a\nMKV\n", b">b\nMKL\n"
PACKED = gzip.compress(FIRST + SECOND, mtime=0)


@pytest.mark.parametrize(
    "content",
    [
        FIRST + SECOND,
        PACKED,
        gzip.compress(FIRST, mtime=0) + gzip.compress(SECOND, mtime=0),
        PACKED + bytes(1_000),
    ],
    ids=["plain", "one member", "two members", "zeros"],
)
def test_the_format_follows_from_the_bytes_not_the_name(prepare_bytes, content):
    # All are called proteins.fasta.
    report = prepare_bytes(content)
    assert report["splits"]["train"]["sequences"] == 2
    assert report["sources"][0]["bytes"] == len(content)


def test_garbage_is_refused_unless_it_is_ignored(refuse_bytes, prepare_bytes):
    assert "other data follow" in refuse_bytes(PACKED + b"garbage")
    report = prepare_bytes(PACKED + b"garbage", ignore_trailing_garbage=True)
    assert report["splits"]["train"]["sequences"] == 2


def test_the_command_accepts_a_wrong_name_and_on_request_garbage(protlm_in_process, tmp_path):
    (tmp_path / "plain.fasta.gz").write_bytes(FIRST)
    (tmp_path / "packed.fasta").write_bytes(gzip.compress(SECOND) + b"garbage")
    arguments = ["prepare", "plain.fasta.gz", "packed.fasta", "--out", "data"]
    done = protlm_in_process(*arguments, cwd=tmp_path)
    assert done.returncode == 3
    (flag,) = re.findall(r"type (--\S+)", done.stderr)
    done = protlm_in_process(*arguments, flag, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
