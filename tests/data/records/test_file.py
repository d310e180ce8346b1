"""Files, bytes and blocks: foreign formats; gzip that is damaged or a bomb; pipes; limits."""

import builtins
import gzip
import hashlib
import io
import os
import pickle
import random
import tarfile
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from protlm.data.records import MAX_LISTED, SequenceFile, Tally, read_records
from protlm.data.records.block import cut
from protlm.data.records.record import TOO_LONG
from protlm.data.records.source import ByteSource, text_lines
from protlm.system.errors import InputDataError


def tarred(name: str, content: bytes) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as file:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        file.addfile(member, io.BytesIO(content))
    return archive.getvalue()


# What is not a file of records, and what the message says of it.
OTHERS: list[tuple[bytes, str]] = [
    (b"", "line 1: the file is empty"),
    (b"\n\n \n", "the file is empty"),
    (b"MKVLL\nMKV\n", "line 1: 'MKVLL' precedes the first header"),
    (b"\n\njunk\n>a\nMKV\n", "line 3: 'junk' precedes"),
    (b"# comment\n>a\nMKV\n", "line 1: this is a comment"),
    (b"!comment\n>a\nMKV\n", "line 1: this is a comment"),
    (b"; comment\n>a\nMKV\n", "line 1: this is a comment"),
    (b"@read\nACGT\n+\nIIII\n", "line 1: this is FASTQ"),
    (b"PK\x03\x04\x00\x00", "zip"),
    (b"BZh91AY", "bzip2"),
    (b"\xfd7zXZ\x00\x00", "xz"),
    (b"\x28\xb5\x2f\xfd\x00", "zstd"),
    (b"\x89HDF\r\n\x1a\n\x00\x00", "HDF5"),
    (b"%PDF-1.7\n", "PDF"),
    (b"LOCUS       SCU49845 5028 bp DNA\n", "GenBank"),
    (b"ID   X56734; SV 1; linear; mRNA; STD; PLN; 1859 BP.\nXX\n//\n", "an EMBL flat file"),
    (b"# STOCKHOLM 1.0\n", "Stockholm"),
    (b"CLUSTAL W (1.82)\n", "Clustal"),
    (b"REMARK   1\n", "PDB"),
    (b"# license\n\ndata_1ABC\n", "mmCIF"),
    (gzip.compress(gzip.compress(b">a\nMKV\n")), "compressed by gzip twice; type: gunzip"),
    (tarred("uniprot_sprot.fasta.gz", b">a\nMKV\n"), "tar archive; type: tar xf"),
]

OTHER_XML = [
    (b'<?xml version="1.0"?>\n<UniRef50 xmlns="http://uniprot.org/uniref">', "UniRef's FASTA"),
    (b'<UniRef100 releaseDate="2020">', "UniRef's FASTA"),
    (b'<uniparc xmlns="http://uniprot.org/uniparc">', "UniParc's FASTA"),
    (b"<html><body>503</body></html>", "a web page"),
    (b"<!DOCTYPE html>\n<html>", "a web page"),
    (b"<svg/>", "XML of <svg>"),
    (b"<uniprot/>", "no entry"),
    (b"<uniprot>\n</uniprot>", "no entry"),
    (b"<uniprot", "neither UniProt XML"),
    (b"<?xml version='1.0' encoding='ISO-8859-1'?><uniprot>", "ISO-8859-1"),
    (b"<!-- endless", "neither UniProt XML"),
]
COMMENTED = (b">a\nMKV\n; comment\nLLL\n", "line 3: this is a comment")
REFUSED = [(content, f"{message}.*protlm reads FASTA") for content, message in OTHERS]
REFUSED += [*OTHER_XML, COMMENTED]


# Numbers: a gzip header holds the time, and workers must agree on the names.
@pytest.mark.parametrize(("content", "message"), REFUSED, ids=range(len(REFUSED)))
def test_other_formats_are_rejected_by_name(read, content, message):
    for data in (content, gzip.compress(content), b"\xef\xbb\xbf" + content):
        with pytest.raises(InputDataError, match=rf"proteins\.fasta.*{message}"):
            read(data)


def test_a_file_of_comments_alone_is_an_error(read):
    with pytest.raises(InputDataError, match=r"proteins\.fasta: the file contains comments, and"):
        read(b"; one\n# two\n", allow_comments=True)


def test_many_blocks_contain_the_records_of_one(read, small_blocks):
    rng = np.random.default_rng(0)
    letters = list("ACDEFGHIKLMNPQRSTVWYXUjx*-1> \t")
    weights = [30] * 20 + [1] * 10
    content = "".join(
        f">{'h' * rng.integers(0, 9)} {number}\n"
        + "".join(rng.choice(letters, rng.integers(0, 90), p=np.array(weights) / sum(weights)))
        + "\n" * rng.integers(0, 3)
        for number in range(800)
    ).encode()
    content = b"\xef\xbb\xbf" + content
    expected = read(content)
    assert expected[1].changed["byte order mark removed"] == 1
    assert expected[1].num_rejected > 50 and expected[1].changed.total() > 50
    for size in (1, 100, 5_000):
        small_blocks(size)
        assert read(content) == expected


def test_an_endless_record_is_truncated_and_counted(read, small_blocks):
    small_blocks(1 << 16)
    for letters in (b"M" * 10_000_000, b"M\n" * 5_000_000):
        records, tally = read(b">a\nMKV\n>long one\n" + letters + b"\n>c\nMKL\n")
        assert [(r.identifier, r.line) for r in records] == [
            ("a", 1),
            ("c", 5 if b"\n" not in letters else 5 + letters.count(b"\n")),
        ]
        assert tally.records == 3
        assert tally.listed == {TOO_LONG: [("long", "proteins.fasta", 3)]}
    records, tally = read(b">a\nMKV\n>" + b"h" * 10_000_000 + b"\nMKV\n>c\nMKL\n")
    assert [(r.identifier, r.line) for r in records] == [("a", 1), ("c", 5)]
    ((reason, [(name, _, line)]),) = tally.listed.items()
    assert reason.startswith("header of more than") and line == 3 and len(name) < 70_000


def test_a_bomb_of_one_line_fits_in_memory(tmp_path):
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b">bomb\n" + b"M" * 100_000_000, compresslevel=1))
    tally = Tally()
    tracemalloc.start()
    try:
        records = list(read_records(path, tally))
        assert tracemalloc.get_traced_memory()[1] < 60_000_000
    finally:
        tracemalloc.stop()
    assert records == []
    assert tally.rejected == {TOO_LONG: 1}


def test_a_rejected_file_is_closed(tmp_path):
    # Warnings are errors: a file left open would fail the test.
    for content in (b"", b"junk", b"\x1f\x8b\x08"):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(InputDataError):
            SequenceFile(tmp_path / "x")
    for path in (tmp_path / "none.fasta", tmp_path):
        with pytest.raises(InputDataError):
            SequenceFile(path)


def content_of(path: Path, **options: bool) -> bytes:
    with ByteSource(path, "a file", **options) as source:
        content = b"".join(source.blocks())
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
        ("members.gz", packed(b">a\nMKV\n", b"", b">b\nMKL\n")),
        ("bytes.gz", packed(*(bytes([byte]) for byte in b">a\nMKV\n>b\nMKL\n"))),
        ("zeros.gz", packed(b">a\nMKV\n") + bytes(70_000) + packed(b">b\nMKL\n") + bytes(512)),
        ("gzip.fasta", packed(b">a\nMKV\n>b\nMKL\n")),
        ("plain.gz", b">a\nMKV\n>b\nMKL\n"),
    ],
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


def damaged(content: bytes) -> Iterator[tuple[bytes, str]]:
    """Gzip with other data behind it, cut anywhere, and with a bit flipped; and the message."""
    rng = np.random.default_rng(0)
    for garbage in (b"garbage", b"\0\0g", b"\x1f"):
        yield content + garbage, "other data follow"
    for size in [*rng.integers(2, len(content), 20), 2, len(content) - 1, len(content) - 8]:
        yield content[:size], f"truncated .* near byte {size:,}"
    # The data follow a time and a name, which no checksum covers; the last byte of the
    # data may hold bits without meaning.
    start = content.index(b"\0", 10) + 1 if content[3] & 8 else 10
    offsets = rng.integers(start, len(content) - 9, 46)
    for offset in [*offsets, *range(len(content) - 4, len(content))]:
        flipped = bytearray(content)
        flipped[offset] ^= 1 << (offset % 8)
        yield bytes(flipped), ""


def test_damaged_gzip_never_passes(tmp_path, tiny_fasta, any_zlib):
    path, whole = tmp_path / "damaged.gz", tiny_fasta.read_bytes()
    for content, message in damaged(whole):
        path.write_bytes(content)
        with pytest.raises(InputDataError, match=rf"damaged\.gz.*{message}"):
            content_of(path)
    path.write_bytes(whole + b"garbage" * 100_000)
    assert content_of(path, ignore_trailing_garbage=True) == gzip.decompress(whole)


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
            with SequenceFile(Path("-")) as file:
                (block,) = file.blocks()
                assert block.data == b">a\nMKV\n" * 9
                assert file.source.sha256 == hashlib.sha256(content).hexdigest()
    finally:
        os.dup2(saved, 0)
        writer.join()
        for descriptor in (saved, read_end):
            os.close(descriptor)


def test_an_unreadable_file_is_reported(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_bytes(b"text")
    with (
        Path(os.devnull).open("wb", buffering=0) as unreadable,
        ByteSource(path, "a file") as source,
    ):
        monkeypatch.setattr(source, "_raw", unreadable)
        with pytest.raises(InputDataError, match=r"a\.txt cannot be read"):
            list(source.blocks())
        monkeypatch.undo()


def test_text_is_read_by_lines_and_an_endless_one_is_rejected_before_it_fills_memory(tmp_path):
    path = tmp_path / "table.tsv"
    path.write_bytes(packed(b"a\tb\n" + b"c" * (40 << 20)))
    with pytest.raises(InputDataError, match=r"table\.tsv: a line has more than 16,777,216 bytes"):
        list(text_lines(path, "a table"))
    path.write_bytes((b"a\tb" * 200 + b"\r") * 30_000)
    assert sum(1 for _ in text_lines(path, "a table")) == 30_000
    for content in (b"a\tb\r\nc\xff\td", packed(b"a\tb\r\nc\xff\td")):
        path.write_bytes(content)
        assert list(text_lines(path, "a table")) == ["a\tb", "c\udcff\td"]


def test_what_is_no_file_is_named(tmp_path, monkeypatch):
    """As in the shell: <(zcat a.gz b.gz)."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputDataError, match="is a pipe or a device, not a file: write"):
        ByteSource(tmp_path / "pipe", "a file")
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(InputDataError, match="standard input is closed"):
        ByteSource(Path("-"), "a file")


# --- blocks: cut by bytes alone, between records

MARKERS = [b"\n>", b"\nID   ", b"<entry"]


def pieces_of(content, marker, rng=None, **options):
    """The pieces of a stream that comes in chunks of random sizes, or at once."""
    chunks, place = [], 0
    while place < len(content):
        size = rng.choice([0, 1, 2, 7, 50]) if rng else len(content)
        chunks.append(content[place : place + size])
        place += size
    return list(cut(iter(chunks), marker, **options))


def stream(marker, lengths):
    return marker.lstrip(b"\n") + marker.join(b"x\n" * length for length in lengths)


@pytest.mark.parametrize("marker", MARKERS)
def test_pieces_are_the_stream_and_begin_with_records(marker):
    rng = random.Random(0)
    for _ in range(200):
        lengths = [rng.randrange(30) for _ in range(rng.randrange(1, 30))]
        content = stream(marker, lengths)
        pieces = pieces_of(content, marker, max_record=1_000, size=40)
        assert b"".join(piece.data for piece in pieces) == content
        assert all(piece.data.startswith(marker.lstrip(b"\n")) for piece in pieces)
        assert all(len(piece.data) >= 39 for piece in pieces[:-1])
        assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert [piece.num_lines for piece in pieces[:-1]] == [
            piece.data.count(b"\n") for piece in pieces[:-1]
        ]
        assert not any(piece.is_cut for piece in pieces)


@pytest.mark.parametrize("marker", MARKERS)
def test_the_sizes_of_chunks_do_not_matter(marker):
    rng = random.Random(1)
    for _ in range(100):
        lengths = [rng.choice([0, 5, 20, 60, 300]) for _ in range(20)]
        content = stream(marker, lengths) + marker[: rng.randrange(len(marker))]
        expected = pieces_of(content, marker, max_record=100, size=40)
        for _ in range(5):
            assert pieces_of(content, marker, rng, max_record=100, size=40) == expected


@pytest.mark.parametrize("marker", MARKERS)
@pytest.mark.parametrize("is_last", [False, True])
def test_the_end_of_a_record_that_is_too_long_is_left_out(marker, is_last, monkeypatch):
    monkeypatch.setattr("protlm.data.records.block.BLOCK_BYTES", 16)
    rest = b"" if is_last else marker + b"last\n"
    content = stream(marker, [1, 1_000]) + rest
    pieces = pieces_of(content, marker, max_record=100, size=40)
    assert pieces[0].is_cut and len(pieces[0].data) == 140
    assert pieces[0].is_last == is_last
    if not is_last:
        assert pieces[1].data == rest.lstrip(b"\n")
        assert pieces[0].num_lines == content[: -len(pieces[1].data)].count(b"\n")


def test_memory_is_bounded_for_any_stream(monkeypatch):
    monkeypatch.setattr("protlm.data.records.block.BLOCK_BYTES", 1_000)
    given = 0

    def endless():
        nonlocal given
        while given < 10_000_000:
            given += 1_000
            yield b"M" * 1_000

    (piece,) = cut(endless(), b"\n>", max_record=5_000, size=1_000)
    assert len(piece.data) == 6_000
    assert piece.is_cut and piece.is_last


def test_the_sum_of_parts_is_the_whole():
    """Of what is rejected, the first thousand of all parts are listed."""
    rng = random.Random(0)
    whole, parts = Tally(), [Tally() for _ in range(7)]
    for number, part in enumerate(parts):
        for line in range(rng.randrange(2_000)):
            kind, reason = rng.choice(["", "filtered", "changed", "noted"]), rng.choice("ab")
            for tally in (whole, part):
                tally.records += 1
                if kind:
                    getattr(tally, kind)[reason] += 1
                else:
                    tally.reject(reason, f"{number}/{line}", "x.fasta", line)
    total = Tally()
    for part in parts:
        total.add(pickle.loads(pickle.dumps(part)))
    assert total == whole
    assert total.num_rejected + total.num_filtered == sum(
        part.num_rejected + part.num_filtered for part in parts
    )
    for reason, listed in total.listed.items():
        everything = [one for part in parts for one in part.listed[reason]]
        assert len(everything) == total.rejected[reason] > MAX_LISTED
        assert listed == everything[:MAX_LISTED]
