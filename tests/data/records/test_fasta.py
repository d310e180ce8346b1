"""Each row of the table of malformed input, and damage to gzip files."""

import builtins
import gzip
import tracemalloc

import numpy as np
import pytest
from Bio.SeqIO.FastaIO import SimpleFastaParser

from protlm.data.records import MAX_LISTED, Tally
from protlm.data.records.fasta import MAX_RESIDUES, read_fasta
from protlm.data.vocabulary import RESIDUES
from protlm.errors import InputDataError
from protlm.paths import sample_dir

TINY = sample_dir() / "uniprot_tiny.fasta.gz"


@pytest.fixture
def read(tmp_path):
    """Reads bytes as a FASTA file: records and tally."""

    def read_bytes(content: bytes, **options):
        path, tally = tmp_path / "proteins.fasta", Tally()
        path.write_bytes(content)
        return list(read_fasta(path, tally, **options)), tally

    return read_bytes


def test_a_plain_file(read):
    records, tally = read(
        b">sp|P12345|AATM_RABIT Aspartate\nMKV\nLLA\n\n>b two words\nWWW\n>tr|Q1|X\nW"
    )
    assert [(r.identifier, r.header, r.sequence, r.line) for r in records] == [
        ("P12345", "sp|P12345|AATM_RABIT Aspartate", "MKVLLA", 1),
        ("b", "b two words", "WWW", 5),
        ("Q1", "tr|Q1|X", "W", 7),
    ]
    assert tally == Tally(records=3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1: the file is empty"),
        (b"\n\n \n", "the file is empty"),
        (b"MKVLL\nMKV\n", "line 1: 'MKVLL' stands before the first header"),
        (b"\n\njunk\n>a\nMKV\n", "line 3: 'junk' stands before"),
        (b"# comment\n>a\nMKV\n", "line 1: '# comment' stands before"),
        (b"; comment\n>a\nMKV\n", "line 1: a ';' comment"),
        (b">a\nMKV\n; comment\nLLL\n", "line 3: a ';' comment"),
        (b"@read\nACGT\n+\nIIII\n", "line 1: this is FASTQ"),
        (">a\nMKV\n".encode("utf-16"), "UTF-16"),
        (">a\nMKV\n".encode("utf-16-le"), "UTF-16"),
        (">a\nMKV\n".encode("utf-16-be"), "UTF-16"),
        (b"\x1f\x8b\x08\x00", "byte"),
        (b"PK\x03\x04\xff\xfe\x80", "line 1: 'PK"),
    ],
)
def test_what_is_no_fasta_is_an_error_with_its_place(read, content, message):
    with pytest.raises(InputDataError, match=r"proteins\.fasta") as caught:
        read(content)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "sequence", "change"),
    [
        (b"\xef\xbb\xbf>a\nMKV\n", "MKV", "byte order mark removed"),
        (b">a\nmkV\n", "MKV", "lower case raised"),
        (b">a\nMKV*\n", "MKV", "terminal '*' removed"),
        (b">a\nMKV\n*\n", "MKV", "terminal '*' removed"),
        (b">a\nMJV\n", "MXV", "J written as X"),
        (b">\nMKV\n", "MKV", "bare '>' named by its line"),
        (b">a caf\xe9\nMKV\n", "MKV", "header bytes that are no UTF-8 escaped"),
    ],
)
def test_what_is_changed_is_counted(read, content, sequence, change):
    (record,), tally = read(content)
    assert record.sequence == sequence
    assert tally.changed == {change: 1}
    assert tally.rejected == {}


@pytest.mark.parametrize(
    "content",
    [
        b">a\r\nMKV\r\nLL\r\n",
        b">a\rMKV\rLL\r",
        b">a\nM K\tV\n  LL  ",
        b">a\n\nMKV\n\nLL\n\n",
        b">a\nMKV\x0b\x0cLL\n",
    ],
)
def test_line_ends_and_white_space_do_not_matter(read, content):
    (record,), tally = read(content)
    assert record.sequence == "MKVLL"
    assert tally == Tally(records=1)


@pytest.mark.parametrize(
    ("letters", "reason"),
    [
        (b"", "blank sequence"),
        (b"\n\n", "blank sequence"),
        (b" \t ", "blank sequence"),
        (b"*", "blank sequence"),
        (b"MK*V", "'*' inside the sequence"),
        (b"MK1V", "digit"),
        (b"MK-V", "gap"),
        (b"MK.V", "gap"),
        (b"MK~V", "gap"),
        (b"MK\x00V", "NUL byte"),
        (b"MK>V", "'>' inside a line"),
        (b" >b\nMKV", "'>' inside a line"),
        ("MKÅV".encode(), "letter that is not ASCII"),
        (b"MK\xffV", "letter that is not ASCII"),
        (b"MK@V", "character that is no letter"),
        (b"M" * (MAX_RESIDUES + 1), f"longer than {MAX_RESIDUES:,} residues"),
        (b"M" * 10_000_000, f"longer than {MAX_RESIDUES:,} residues"),
        (b"M" + b" " * 10_000_000 + b"K", f"longer than {MAX_RESIDUES:,} residues"),
    ],
)
def test_what_is_no_protein_is_rejected_by_reason_and_nothing_else_is(read, letters, reason):
    records, tally = read(b">a\nMKV\n>bad one\n" + letters + b"\n>c\nMKL\n")
    assert [r.sequence for r in records] == ["MKV", "MKL"]
    assert tally.rejected == {reason: 1}
    assert tally.listed == {reason: [("bad", 3)]}
    assert tally.records == 3
    assert not tally.changed


def test_rare_residues_are_tokens_of_their_own(read):
    (record,), tally = read(b">a\nMBZXUOK\n")
    assert record.sequence == "MBZXUOK"
    assert tally.noted == {"record with B, O, U, X or Z": 1}


def test_headers_in_utf8_are_kept(read):
    (record,), tally = read(">β-lactamase Å\nMKV\n".encode())
    assert record.identifier == "β-lactamase"
    assert not tally.changed


def test_bytes_that_are_no_utf8_are_escaped_in_headers(read):
    (record,), _ = read(b">a caf\xe9\nMKV\n")
    assert record.header == "a caf\\xe9"


def test_a_bare_header_is_named_by_its_line(read):
    records, _ = read(b">a\nMKV\n>\nMKL\n>  \nMKK\n")
    assert [r.identifier for r in records] == ["a", "line:3", "line:5"]


def test_duplicate_identifiers_are_kept(read):
    records, _ = read(b">a\nMKV\n>a\nMKL\n")
    assert [r.identifier for r in records] == ["a", "a"]


def test_long_headers_are_cut_and_stay_distinct(read):
    stem = b">" + b"h" * 2_000_000
    records, tally = read(stem + b"1\nMKV\n" + stem + b"2\nMKL\n")
    assert [(r.sequence, r.line) for r in records] == [("MKV", 1), ("MKL", 3)]
    assert max(len(r.header) for r in records) < 66_000
    assert records[0].identifier != records[1].identifier
    assert tally.changed == {"header shortened": 2}


@pytest.mark.parametrize("length", range(65_530, 65_545))
def test_lines_about_as_long_as_a_piece(read, length):
    header, sequence = "h" * length, "MK" * (length // 2) + "V" * (length % 2)
    first, second = read(f">{header}\n{sequence}\n>b\n{sequence}".encode())[0]
    assert first.header[:65_000] == header[:65_000]
    assert first.sequence == second.sequence == sequence
    assert second.line == 3


def test_a_header_sign_at_the_start_of_a_piece_is_no_header(read):
    records, tally = read(b">a\n" + b"M" * (1 << 16) + b">b\nMKV\n")
    assert records == []
    assert tally.rejected == {"'>' inside a line": 1}


def test_titin_passes(read):
    (record,), tally = read(b">titin\n" + b"M" * 35_213)
    assert len(record.sequence) == 35_213
    assert not tally.rejected


def test_only_the_first_rejects_are_listed(read):
    _, tally = read(b">a\nMKV\n" + b">blank\n" * (MAX_LISTED + 5))
    assert tally.rejected == {"blank sequence": MAX_LISTED + 5}
    assert len(tally.listed["blank sequence"]) == MAX_LISTED


def test_nucleotides_are_refused_unless_allowed(read):
    dna = b"".join(b">r%d\nACGTTGCANNACGT\n" % i for i in range(50)) + b">p\nMKVLW\n"
    with pytest.raises(InputDataError, match=r"DNA or RNA.*--allow-nucleotides"):
        read(dna)
    records, tally = read(dna, allow_nucleotides=True)
    assert len(records) == 51
    assert tally.noted == {"record of the letters ACGTUN alone": 50}


def test_nucleotides_among_proteins_are_noted(read):
    proteins = b"".join(b">p%d\nMKVLLWDEYRQ\n" % i for i in range(50))
    records, tally = read(proteins + b">d\nACGTACGT\n")
    assert len(records) == 51
    assert tally.noted == {"record of the letters ACGTUN alone": 1}


def test_no_file_and_a_folder_are_errors(tmp_path):
    for path in (tmp_path / "none.fasta", tmp_path):
        with pytest.raises(InputDataError):
            list(read_fasta(path, Tally()))


def test_the_sample_is_read_as_biopython_reads_it():
    tally = Tally()
    with gzip.open(TINY, "rt") as file:
        expected = list(SimpleFastaParser(file))
    records = list(read_fasta(TINY, tally))
    assert [(r.header, r.sequence) for r in records] == expected
    assert len(records) == 180
    assert not tally.rejected
    assert not tally.changed


# --- gzip


def outcome(path):
    return [(r.header, r.sequence) for r in read_fasta(path, Tally())]


@pytest.fixture(params=["igzip", "gzip of the standard library"])
def any_gunzip(request, monkeypatch):
    """Runs a test with isal and as if isal were not installed."""
    if request.param != "igzip":
        real = builtins.__import__

        def without_isal(name, *args, **kwargs):
            if name.startswith("isal"):
                raise ImportError(name)
            return real(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", without_isal)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (
            "two members.gz",
            gzip.compress(b">a\nMKV\n", mtime=0) + gzip.compress(b">b\nMKL\n", mtime=0),
        ),
        ("trailing zeros.gz", gzip.compress(b">a\nMKV\n>b\nMKL\n", mtime=0) + bytes(512)),
        ("gzip called.fasta", gzip.compress(b">a\nMKV\n>b\nMKL\n", mtime=0)),
        ("plain called.gz", b">a\nMKV\n>b\nMKL\n"),
    ],
    ids=["two members", "trailing zeros", "called fasta", "plain"],
)
def test_gzip_is_known_by_its_first_bytes(tmp_path, any_gunzip, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    assert outcome(path) == [("a", "MKV"), ("b", "MKL")]


def test_garbage_after_gzip_data_is_an_error(tmp_path, any_gunzip):
    path = tmp_path / "garbage.gz"
    path.write_bytes(TINY.read_bytes() + b"garbage")
    with pytest.raises(InputDataError, match="byte"):
        outcome(path)


def test_truncated_gzip_never_passes(tmp_path, any_gunzip):
    content, path = TINY.read_bytes(), tmp_path / "truncated.gz"
    rng = np.random.default_rng(0)
    for size in [*rng.integers(1, len(content), 20), len(content) - 1, len(content) - 8]:
        path.write_bytes(content[:size])
        with pytest.raises(InputDataError, match="truncated"):
            outcome(path)


def test_a_flipped_bit_in_gzip_data_never_passes(tmp_path, any_gunzip):
    content, path = TINY.read_bytes(), tmp_path / "flipped.gz"
    # Before the data stand a time and a name, which no checksum covers; the last byte of the
    # data may hold bits without meaning.
    start = content.index(b"\0", 10) + 1 if content[3] & 8 else 10
    offsets = np.random.default_rng(0).integers(start, len(content) - 9, 46)
    for offset in [*offsets, *range(len(content) - 4, len(content))]:
        flipped = bytearray(content)
        flipped[offset] ^= 1 << (offset % 8)
        path.write_bytes(flipped)
        with pytest.raises(InputDataError, match=r"flipped\.gz"):
            outcome(path)


def test_a_bomb_of_one_line_fits_in_memory(tmp_path):
    path = tmp_path / "bomb.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b">bomb\n")
        for _ in range(100):
            file.write(b"M" * 1_000_000)
    tally = Tally()
    tracemalloc.start()
    try:
        records = list(read_fasta(path, tally))
        assert tracemalloc.get_traced_memory()[1] < 30_000_000
    finally:
        tracemalloc.stop()
    assert records == []
    assert tally.num_rejected == 1


def test_absurd_compression_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("protlm.data.records.source._BOMB_BYTES", 1 << 20)
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b">bomb\n" + b"M" * (8 << 20)))
    with pytest.raises(InputDataError, match="200-fold"):
        outcome(path)


# --- anything


def test_arbitrary_bytes_give_records_or_our_error(tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "fuzz"
    pieces = [
        b">",
        b"\n",
        b"\r",
        b";",
        b"@",
        b"*",
        b"MKV",
        b"\0",
        b"\xff",
        b" ",
        b"sp|P1|",
        b"\x1f\x8b",
    ]
    outcomes = {True: 0, False: 0}
    for case in range(2_000):
        if case % 2:
            content = rng.bytes(rng.integers(0, 60))
        else:
            content = b">" * (case % 4 == 0) + b"".join(
                pieces[i] for i in rng.integers(0, len(pieces), rng.integers(0, 30))
            )
        path.write_bytes(content)
        tally = Tally()
        try:
            records = list(read_fasta(path, tally))
        except InputDataError:
            outcomes[False] += 1
            continue
        outcomes[True] += 1
        assert len(records) + tally.num_rejected == tally.records
        assert all(r.sequence and set(r.sequence) <= set(RESIDUES) for r in records)
        assert all(r.identifier and r.identifier.encode() for r in records)
    assert min(outcomes.values()) > 100
