"""FASTA: records that are kept, changed or rejected, and files that are rejected."""

import gzip

import pytest
from Bio.SeqIO.FastaIO import SimpleFastaParser

from protlm.data.records import Record, Tally, read_records
from protlm.data.records.fasta import FastaBlock
from protlm.data.records.record import MAX_RESIDUES
from protlm.system.errors import InputDataError
from protlm.system.paths import sample_dir

TINY = sample_dir() / "uniprot_tiny.fasta.gz"


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


# What stands below a header, and the sequence, or none, with the reason or the change.
LETTERS: list[tuple[bytes, str, str]] = [
    (b"MKV\r\nLL\r", "MKVLL", ""),
    (b"MKV\rLL\r", "MKVLL", ""),
    (b"M K\tV\n  LL  ", "MKVLL", ""),
    (b"\nMKV\n\nLL\n\n", "MKVLL", ""),
    (b"MKV\x0b\x0cLL\n", "MKVLL", ""),
    (b"mkV", "MKV", "lower case raised"),
    (b"MKV*", "MKV", "terminal '*' removed"),
    (b"MKV\n*", "MKV", "terminal '*' removed"),
    (b"MJV", "MXV", "J written as X"),
    (b"MBZXUOK", "MBZXUOK", "record with B, O, U, X or Z"),
    (b"M" * 35_213, "M" * 35_213, ""),
    (b"", "", "blank sequence"),
    (b"\n\n", "", "blank sequence"),
    (b" \t ", "", "blank sequence"),
    (b"*", "", "blank sequence"),
    (b"MK*V", "", "'*' inside the sequence"),
    (b"MK1V", "", "digit"),
    (b"MK-V", "", "gap"),
    (b"MK.V", "", "gap"),
    (b"MK~V", "", "gap"),
    (b"MK\x00V", "", "NUL byte"),
    (b"MK>V", "", "'>' inside a line"),
    (b" >b\nMKV", "", "'>' inside a line"),
    (b"M" * (1 << 16) + b">b\nMKV", "", "'>' inside a line"),
    ("MKÅV".encode(), "", "letter that is not ASCII"),
    (b"MK\xffV", "", "letter that is not ASCII"),
    ("MKV\u00a0\nLL".encode(), "", "letter that is not ASCII"),
    ("MKV\u3000".encode(), "", "letter that is not ASCII"),
    ("\u2028\nMKV".encode(), "", "letter that is not ASCII"),
    (b"MK@V", "", "character that is not a letter"),
    (b"M" * (MAX_RESIDUES + 1), "", f"longer than {MAX_RESIDUES:,} residues"),
    (b"M" * 10_000_000, "", f"longer than {MAX_RESIDUES:,} residues"),
    (b"M" + b" " * 10_000_000 + b"K", "", f"longer than {MAX_RESIDUES:,} residues"),
]

GAPPED = [(b"MK-V.L~", "MKVL", "gaps removed"), (b"---", "", "blank sequence")]


@pytest.mark.parametrize(
    ("letters", "sequence", "told", "allow_gaps"),
    [*((*one, False) for one in LETTERS), *((*one, True) for one in GAPPED)],
    ids=lambda value: repr(value)[:20],
)
def test_odd_letters_are_normalized_or_rejected(read, letters, sequence, told, allow_gaps):
    """With their reason, and without an effect on others, of which one has the same name."""
    content = b">a\nMKV\n>odd one\n" + letters + b"\n>a\nMKL\n"
    records, tally = read(content, allow_gaps=allow_gaps)
    found = [(r.identifier, r.sequence) for r in records]
    assert found == [("a", "MKV"), *[("odd", sequence)] * bool(sequence), ("a", "MKL")]
    assert tally.rejected == ({} if sequence else {told: 1})
    assert tally.listed == ({} if sequence else {told: [("odd", "proteins.fasta", 3)]})
    assert tally.changed + tally.noted == ({told: 1} if sequence and told else {})
    assert tally.records == 3


@pytest.mark.parametrize(
    ("content", "identifier", "header", "change"),
    [
        (">β-lactamase Å".encode(), "β-lactamase", "β-lactamase Å", ""),
        (b">a caf\xe9", "a", "a caf\\xe9", "header bytes that are not UTF-8 escaped"),
        (b">", "line:1", "", "bare '>' named by its line"),
        (b"\n>  ", "line:2", "", "bare '>' named by its line"),
        (b"\xef\xbb\xbf>a", "a", "a", "byte order mark removed"),
    ],
)
def test_odd_headers_are_kept_or_changed(read, content, identifier, header, change):
    (record,), tally = read(content + b"\nMKV\n")
    assert (record.identifier, record.header.strip()) == (identifier, header)
    assert tally.changed == ({change: 1} if change else {})


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


@pytest.mark.parametrize(
    ("shares", "is_refused"),
    [
        ([0.96] * 100, True),
        ([0.94] * 100, False),
        ([1] * 50 + [0], True),
        ([0] * 50 + [1], False),
        ([1] * 940 + [0] * 60, False),
        ([1] * 960 + [0] * 1_000, True),
        ([0] * 1_000 + [1] * 5_000, False),
    ],
)
def test_nucleotides_are_detected_in_the_first_thousand_records(read, shares, is_refused):
    letters = (b"ACGTN" * round(20 * share) + b"W" * round(100 * (1 - share)) for share in shares)
    content = b"".join(b">r\n%b\n" % sequence for sequence in letters)
    if is_refused:
        told = r"the first (51|100|1,000) records are ACGTUN.*DNA or RNA.*--allow-nucleotides"
        with pytest.raises(InputDataError, match=told):
            read(content)
    records, tally = read(content, allow_nucleotides=is_refused)
    assert len(records) == len(shares)
    assert tally.noted["record of the letters ACGTUN alone"] == shares.count(1)


def test_the_sample_is_read_like_by_biopython():
    tally = Tally()
    with gzip.open(TINY, "rt") as file:
        expected = list(SimpleFastaParser(file))
    records = list(read_records(TINY, tally))
    assert [(r.header, r.sequence) for r in records] == expected
    assert len(records) == 180
    assert not tally.rejected
    assert not tally.changed


@pytest.mark.parametrize("place", ["first", "inside", "between"])
def test_comments_are_skipped_by_option(read, place):
    parts = {"first": b"", "inside": b"", "between": b""} | {place: b"; one\n#two\n!three > four\n"}
    content = b"%b>a\nMK\n%bVL\n%b>b\nM1\n" % tuple(parts.values())
    records, tally = read(content, allow_comments=True)
    assert [(r.identifier, r.sequence) for r in records] == [("a", "MKVL")]
    # Lines are those of the file, comments and all.
    assert tally.listed == {"digit": [("b", "proteins.fasta", 7)]}
    with pytest.raises(InputDataError, match=r"--allow-comments"):
        read(content)


def test_a_header_after_white_space_is_accepted_only_at_the_beginning(read):
    """Text that the parser ignores must not be lost silently."""
    for start in (b"", b" \n\t ", b"; c\n", b"; c\n\n  "):
        records, tally = read(start + b">a\nMKV\n  >b\nMKL\n>c\nMKK\n", allow_comments=True)
        assert [r.identifier for r in records] == ["c"]
        line = start.count(b"\n") + 1
        assert tally.listed == {"'>' inside a line": [("a", "proteins.fasta", line)]}
        assert tally.records == 2


@pytest.mark.parametrize(
    ("header", "taxon", "is_fragment", "organism"),
    [
        (
            "tr|A0A1|A0A1_ECOLI Protein (Fragment) OS=Escherichia coli (strain K12) OX=83333 "
            "GN=x PE=4 SV=1",
            83333,
            True,
            "Escherichia coli (strain K12)",
        ),
        ("sp|P1|P1_X Actin OS=Homo sapiens GN=ACT PE=1 SV=1", None, False, "Homo sapiens"),
        ("sp|P1|P1_X Actin (Fragments) OS=Homo sapiens", None, True, "Homo sapiens"),
        ("sp|P1|P1_X Actin OS=X (Fragment) OX=12x PE=1", None, False, "X (Fragment)"),
        ("sp|P1|P1_X (Fragmentin) OS=X OX=7", 7, False, "X"),
        (
            "UniRef50_Q8WZ42 Titin (Fragment) n=4 Tax=Homo sapiens TaxID=9606 RepID=TITIN_HUMAN",
            9606,
            True,
            "Homo sapiens",
        ),
        ("UniRef100_P1 Actin n=1 Tax=unidentified RepID=P1_X", None, False, "unidentified"),
        ("MyRef_P1 Actin n=1 Tax=Homo sapiens TaxID=9606", None, None, None),
        ("sp|P1|P1_X", None, None, None),
        ("mine OX=9606 (Fragment)", None, None, None),
    ],
)
def test_organisms_are_parsed_from_uniprot_headers(read, header, taxon, is_fragment, organism):
    (record,), _ = read(f">{header}\nMKV\n".encode())
    assert (record.taxon, record.is_fragment, record.organism) == (taxon, is_fragment, organism)


ODD = [
    b">mine\nMKV",
    b">\nMKV",
    b">sp|P1|caf\xe9\nMKV",
    ">sp|P1|å\nMKV".encode(),
    b">sp|P1|" + b"h" * (1 << 17) + b"\nMKV",
    b">sp|P1|X OS=Homo sapiens OX=9606\nMKV",
    b">sp|P1|X\n",
    b">sp|P1|X\nMXV",
    b">sp|P1|X\nMJV",
    b">sp|P1|X\nmkv*",
    b">sp|P1|X\nM1V",
    b">sp|P1|X\nM\xffV",
    ">sp|P1|X\nMÅV".encode(),
    b">sp|P1|X\nACGT",
    b">sp|P1|X\n" + b"M" * (MAX_RESIDUES + 1),
]


@pytest.mark.parametrize("place", [0, 20, 70])
@pytest.mark.parametrize("odd", ODD, ids=lambda odd: repr(odd[:20]))
def test_a_record_does_not_depend_on_adjacent_records(read, monkeypatch, odd, place):
    """Records are checked together if all of them are usual, and otherwise one by one."""
    others = [b">tr|Q%d|Q%d_X\nMKVLW\nDEYRQ" % (n, n) for n in range(80)]
    content = b"\n\n".join([*others[:place], odd, *others[place:]])
    together = read(content)
    assert together[1].records >= 81
    monkeypatch.setattr(FastaBlock, "_usual", lambda block, some, tally: [])
    assert together == read(content)


def test_usual_records_are_checked_together(read, monkeypatch):
    monkeypatch.setattr(FastaBlock, "_one_by_one", None)
    records, tally = read(b"".join(b">sp|P%d|N\nMKV\n" % n for n in range(100)))
    assert [(r.identifier, r.header, r.sequence, r.line) for r in records] == [
        (f"P{n}", f"sp|P{n}|N", "MKV", 2 * n + 1) for n in range(100)
    ]
    assert {type(record) for record in records} == {Record}
    assert tally == Tally(records=100)


def test_origins_are_parsed_only_on_request(read):
    content = b">sp|P1|P1_X Actin (Fragment) OS=Homo sapiens OX=9606\nMKV\n>sp|P2|X\nM1V\n"
    (record,), tally = read(content)
    (without,), same = read(content, origins=False)
    assert without == record._replace(taxon=None, is_fragment=None, organism=None)
    assert record.taxon == 9606
    assert tally == same
