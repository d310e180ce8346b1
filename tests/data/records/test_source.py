"""Bytes of a file: gzip that is intact, concatenated, padded, damaged, or a zip bomb."""

import builtins
import gzip
import hashlib
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from protlm.data.records.source import ByteSource, text_lines
from protlm.system.errors import InputDataError
from protlm.system.paths import sample_dir

TINY = sample_dir() / "uniprot_tiny.fasta.gz"


def content_of(path: Path, **options: bool) -> bytes:
    with ByteSource(path, "a file", **options) as source:
        content = b"".join(source.chunks())
        raw = path.read_bytes()
        assert (source.num_bytes, source.sha256) == (len(raw), hashlib.sha256(raw).hexdigest())
    return content


@pytest.fixture(params=["igzip", "zlib of the standard library"])
def any_zlib(request, monkeypatch):
    """Runs a test with isal and as if isal were not installed."""
    if request.param != "igzip":
        real = builtins.__import__

        def without_isal(name, *args, **kwargs):
            if name.startswith("isal"):
                raise ImportError(name)
            return real(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", without_isal)


def packed(*parts: bytes) -> bytes:
    return b"".join(gzip.compress(part, mtime=0) for part in parts)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("whole.gz", packed(b">a\nMKV\n>b\nMKL\n")),
        ("members.gz", packed(b">a\nMKV\n", b"", b">b\nMKL\n")),
        ("bytes.gz", packed(*(bytes([byte]) for byte in b">a\nMKV\n>b\nMKL\n"))),
        ("zeros.gz", packed(b">a\nMKV\n") + bytes(70_000) + packed(b">b\nMKL\n") + bytes(512)),
        ("gzip.fasta", packed(b">a\nMKV\n>b\nMKL\n")),
        ("plain.gz", b">a\nMKV\n>b\nMKL\n"),
    ],
    ids=["whole", "two members", "many members", "zeros between", "called fasta", "plain"],
)
def test_gzip_is_recognized_by_its_first_bytes(tmp_path, any_zlib, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    assert content_of(path) == b">a\nMKV\n>b\nMKL\n"


def test_highly_compressed_data_are_complete(tmp_path, any_zlib):
    """The last bytes that were read may expand to more than one piece."""
    path = tmp_path / "long.gz"
    for size in (1 << 17, (1 << 17) + 1, 3 << 17, 1_000_003):
        path.write_bytes(packed(b"M" * size, b"K" * size))
        assert content_of(path) == b"M" * size + b"K" * size


def test_garbage_after_gzip_data_is_an_error_unless_ignored(tmp_path, any_zlib):
    path = tmp_path / "garbage.gz"
    for garbage in (b"garbage", b"\0\0g", b"\x1f"):
        path.write_bytes(TINY.read_bytes() + garbage)
        with pytest.raises(InputDataError, match="other data follow"):
            content_of(path)
    path.write_bytes(TINY.read_bytes() + b"garbage" * 100_000)
    expected = gzip.decompress(TINY.read_bytes())
    assert content_of(path, ignore_trailing_garbage=True) == expected


def test_truncated_gzip_never_passes(tmp_path, any_zlib):
    content, path = TINY.read_bytes(), tmp_path / "truncated.gz"
    rng = np.random.default_rng(0)
    for size in [*rng.integers(2, len(content), 20), 2, len(content) - 1, len(content) - 8]:
        path.write_bytes(content[:size])
        with pytest.raises(InputDataError, match=rf"truncated .* near byte {size:,}"):
            content_of(path)


def test_a_flipped_bit_in_gzip_data_never_passes(tmp_path, any_zlib):
    content, path = TINY.read_bytes(), tmp_path / "flipped.gz"
    # The data follow a time and a name, which no checksum covers; the last byte of the
    # data may hold bits without meaning.
    start = content.index(b"\0", 10) + 1 if content[3] & 8 else 10
    offsets = np.random.default_rng(0).integers(start, len(content) - 9, 46)
    for offset in [*offsets, *range(len(content) - 4, len(content))]:
        flipped = bytearray(content)
        flipped[offset] ^= 1 << (offset % 8)
        path.write_bytes(flipped)
        with pytest.raises(InputDataError, match=r"flipped\.gz"):
            content_of(path)


def test_zip_bombs_are_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr("protlm.data.records.source._BOMB_BYTES", 1 << 20)
    path = tmp_path / "bomb.gz"
    path.write_bytes(packed(b"M" * (8 << 20)))
    with pytest.raises(InputDataError, match="200-fold"):
        content_of(path)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("text", [">a\nMKV\n", "<?xml version='1.0'?>", "ID   P1_X"])
def test_utf16_is_rejected_by_name(tmp_path, encoding, text):
    path = tmp_path / "wide.txt"
    for content in (text.encode(encoding), packed(text.encode(encoding))):
        path.write_bytes(content)
        with pytest.raises(InputDataError, match="UTF-16; type: iconv"):
            content_of(path)


def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path):
    path = tmp_path / "marked.txt"
    path.write_bytes(b"\xef\xbb\xbf>a\nMKV\n")
    with ByteSource(path, "a file") as source:
        assert source.has_mark
        assert b"".join(source.chunks()) == b">a\nMKV\n"


@pytest.mark.parametrize("is_blocking", [True, False])
@pytest.mark.parametrize("content", [b">a\nMKV\n" * 9, packed(b">a\nMKV\n" * 9)])
def test_a_pipe_that_gives_a_byte_at_a_time_is_read_whole(content, is_blocking):
    """A non-blocking pipe reports neither that it is empty nor that it has ended."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, is_blocking)

    def trickle() -> None:
        for byte in content:
            time.sleep(0.0005)
            os.write(write_end, bytes([byte]))
        os.close(write_end)

    writer = threading.Thread(target=trickle)
    writer.start()
    saved = os.dup(0)
    try:
        os.dup2(read_end, 0)
        with pytest.MonkeyPatch.context() as patch, open(0, closefd=False) as stdin:
            patch.setattr("sys.stdin", stdin)
            with ByteSource(Path("-"), "a file") as source:
                assert b"".join(source.chunks()) == b">a\nMKV\n" * 9
                assert source.sha256 == hashlib.sha256(content).hexdigest()
    finally:
        os.dup2(saved, 0)
        writer.join()
        for descriptor in (saved, read_end):
            os.close(descriptor)


def test_closed_standard_input_is_reported(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(InputDataError, match="standard input is closed"):
        ByteSource(Path("-"), "a file")


def test_a_pipe_is_not_called_missing(tmp_path):
    """As in the shell: <(zcat a.gz b.gz)."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputDataError, match="is a pipe or a device, not a file: write"):
        ByteSource(tmp_path / "pipe", "a file")


def test_an_unreadable_file_is_reported(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_bytes(b"text")
    with (
        Path(os.devnull).open("wb", buffering=0) as unreadable,
        ByteSource(path, "a file") as source,
    ):
        monkeypatch.setattr(source, "_raw", unreadable)
        with pytest.raises(InputDataError, match=r"a\.txt cannot be read"):
            list(source.chunks())
        monkeypatch.undo()


def test_an_endless_line_is_rejected_before_it_fills_memory(tmp_path):
    path = tmp_path / "table.tsv"
    path.write_bytes(packed(b"a\tb\n" + b"c" * (40 << 20)))
    with pytest.raises(InputDataError, match=r"table\.tsv: a line has more than 16,777,216 bytes"):
        list(text_lines(path, "a table"))
    path.write_bytes((b"a\tb" * 200 + b"\r") * 30_000)
    assert sum(1 for _ in text_lines(path, "a table")) == 30_000


def test_text_is_read_by_lines(tmp_path):
    path = tmp_path / "table.tsv"
    for content in (b"a\tb\r\nc\xff\td", packed(b"a\tb\r\nc\xff\td")):
        path.write_bytes(b"" + content)
        assert list(text_lines(path, "a table")) == ["a\tb", "c\udcff\td"]
