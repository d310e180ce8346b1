"""Sequence files of every format: recognized by first bytes, divided reproducibly."""

import gzip
import hashlib
import io
import pickle
import subprocess
import sys
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from protlm.data.records import ReadOptions, SequenceFile, Tally, read_records
from protlm.data.records.record import TOO_LONG
from protlm.system.errors import InputDataError
from protlm.system.paths import sample_dir

ROOT = Path(__file__).resolve().parents[3]
FIXTURES = Path(__file__).resolve().parent / "fixtures"
TINY = sample_dir() / "uniprot_tiny.fasta.gz"
FILES = {
    "fasta": TINY,
    "swissprot": FIXTURES / "emboss_trembl_9.dat.gz",
    "xml": FIXTURES / "multi_ex.xml.gz",
}


@pytest.mark.parametrize("format_", FILES)
@pytest.mark.parametrize("name", ["proteins.gz", "proteins.fasta", "proteins.xml", "proteins"])
def test_formats_are_recognized_by_first_bytes_not_by_name(tmp_path, read_path, format_, name):
    expected = read_path(FILES[format_])
    packed = FILES[format_].read_bytes()
    for content in (packed, gzip.decompress(packed), b"\n \n" + gzip.decompress(packed)):
        (tmp_path / name).write_bytes(content)
        with SequenceFile(tmp_path / name) as file:
            assert file.format == format_
        records, _ = read_path(tmp_path / name)
        assert [r.sequence for r in records] == [r.sequence for r in expected[0]]


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


@pytest.mark.parametrize(
    ("content", "message"),
    [*((content, f"{message}.*protlm reads FASTA") for content, message in OTHERS), *OTHER_XML],
    # Numbers: a gzip header holds the time, and workers must agree on the names.
    ids=range(len(OTHERS) + len(OTHER_XML)),
)
def test_other_formats_are_rejected_by_name(read, content, message):
    for data in (content, gzip.compress(content), b"\xef\xbb\xbf" + content):
        with pytest.raises(InputDataError, match=rf"proteins\.fasta.*{message}"):
            read(data)


def test_comments_are_an_error(read):
    with pytest.raises(InputDataError, match=r"proteins\.fasta.* line 3: this is a comment"):
        read(b">a\nMKV\n; comment\nLLL\n")
    with pytest.raises(
        InputDataError, match=r"proteins\.fasta: the file contains comments, and no"
    ):
        read(b"; one\n# two\n", allow_comments=True)


@pytest.mark.parametrize("format_", FILES)
def test_blocks_are_hashed_picklable_and_the_same_every_time(small_blocks, format_):
    small_blocks(10_000)
    path = FILES[format_]
    blocks = []
    for _ in range(2):
        with SequenceFile(path) as file:
            blocks.append(list(file.blocks()))
            raw = path.read_bytes()
            assert file.sha256 == hashlib.sha256(raw).hexdigest()
            assert file.num_bytes == len(raw)
    assert len(blocks[0]) > 2
    assert blocks[0] == blocks[1] == pickle.loads(pickle.dumps(blocks[0]))
    assert [block.is_first for block in blocks[0]] == [True] + [False] * (len(blocks[0]) - 1)
    assert [block.is_last for block in blocks[0][::-1]] == [True] + [False] * (len(blocks[0]) - 1)
    lines = gzip.decompress(raw).split(b"\n")
    for block in blocks[0]:
        first = block.data.partition(b"\n")[0]
        assert lines[block.line - 1].endswith(first)
        assert block.file == path.name


@pytest.mark.parametrize("format_", FILES)
@pytest.mark.parametrize("line_end", [b"\r\n", b"\r"])
def test_line_ends_of_every_kind_give_the_same_blocks(tmp_path, small_blocks, format_, line_end):
    small_blocks(10_000)
    content = gzip.decompress(FILES[format_].read_bytes())
    found = []
    for data in (content, content.replace(b"\n", line_end)):
        (tmp_path / "proteins").write_bytes(data)
        with SequenceFile(tmp_path / "proteins") as file:
            found.append(list(file.blocks()))
    assert found[0] == found[1]


@pytest.mark.parametrize("format_", FILES)
@pytest.mark.parametrize("size", [100, 5_000, 40_000])
def test_blocks_do_not_matter(read_path, small_blocks, format_, size):
    whole = read_path(FILES[format_])
    small_blocks(size)
    assert read_path(FILES[format_]) == whole


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
    expected = read(content)
    assert expected[1].num_rejected > 50 and expected[1].changed.total() > 50
    for size in (1, 100, 5_000):
        small_blocks(size)
        assert read(content) == expected


def test_a_mark_is_counted_once(tmp_path, read_path, small_blocks):
    small_blocks(10_000)
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbf" + gzip.decompress(TINY.read_bytes()))
    records, tally = read_path(tmp_path / "marked")
    assert len(records) == 180
    assert tally.changed == {"byte order mark removed": 1}


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
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b">bomb\n")
        for _ in range(100):
            file.write(b"M" * 1_000_000)
    tally = Tally()
    tracemalloc.start()
    try:
        records = list(read_records(path, tally))
        assert tracemalloc.get_traced_memory()[1] < 60_000_000
    finally:
        tracemalloc.stop()
    assert records == []
    assert tally.rejected == {TOO_LONG: 1}


def test_nucleotides_are_detected_in_every_format(tmp_path, read_path):
    for name in ("multi_ex.dat.gz", "multi_ex.xml.gz"):
        content = gzip.decompress((FIXTURES / name).read_bytes())
        # An entry of a hundred letters of DNA.
        (tmp_path / "dna").write_bytes(_with_dna(content, is_xml="xml" in name))
        with pytest.raises(InputDataError, match="looks like DNA or RNA"):
            read_path(tmp_path / "dna")
        records, tally = read_path(tmp_path / "dna", allow_nucleotides=True)
        assert len(records) == tally.noted["record of the letters ACGTUN alone"] == 1


def _with_dna(content: bytes, *, is_xml: bool) -> bytes:
    if is_xml:
        begin = content.index(b"<sequence length")
        tail = b"</entry></uniprot>"
        return content[:begin] + b'<sequence length="100">' + b"ACGTN" * 20 + b"</sequence>" + tail
    begin = content.index(b"SQ   SEQUENCE")
    head = content[:begin].replace(b" 562 AA.", b" 100 AA.")
    return head + b"SQ   SEQUENCE   100 AA;  1 MW;  0 CRC64;\n     " + b"ACGTN" * 20 + b"\n//\n"


def test_options_reach_the_blocks(tmp_path):
    path = tmp_path / "a.fasta"
    path.write_bytes(gzip.compress(b"; c\n>a\nMK-V\n") + b"garbage")
    options = ReadOptions(allow_comments=True, allow_gaps=True, ignore_trailing_garbage=True)
    with SequenceFile(path, options) as file:
        (record,) = [r for block in file.blocks() for r in block.records(Tally())]
    assert record.sequence == "MKV"


@pytest.mark.parametrize("format_", FILES)
def test_standard_input_is_read_like_a_file(format_, read_path):
    program = (
        "import sys; from pathlib import Path; from protlm.data.records import read_records, Tally;"
        "print(*(r.identifier for r in read_records(Path('-'), Tally())))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=FILES[format_].read_bytes(),
        capture_output=True,
        env={"PYTHONPATH": str(ROOT)},
        check=True,
    )
    expected = [record.identifier for record in read_path(FILES[format_])[0]]
    assert done.stdout.decode().split() == expected


def test_a_rejected_file_is_closed(tmp_path):
    # Warnings are errors: a file left open would fail the test.
    for content in (b"", b"junk", b"\x1f\x8b\x08"):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(InputDataError):
            SequenceFile(tmp_path / "x")
    for path in (tmp_path / "none.fasta", tmp_path):
        with pytest.raises(InputDataError):
            SequenceFile(path)
