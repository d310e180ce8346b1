"""FASTA: records that are kept, changed or rejected; files and annotation that are refused."""

import gzip
import random
import re
import subprocess

import pytest
from Bio.SeqIO.FastaIO import SimpleFastaParser

from protlm.data.records import Tally, read_records
from protlm.data.records.fasta import FastaBlock
from protlm.data.records.record import MAX_RESIDUES
from protlm.system.errors import InputDataError


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
    (b"0.5 -1.25", "", "digit"),
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
    others = [(b"LIVWY" * 20)[: round(100 * (1 - share))] for share in shares]
    letters = [b"ACGTN" * round(20 * n) + one for n, one in zip(shares, others, strict=True)]
    content = b"".join(b">r\n%b\n" % sequence for sequence in letters)
    if is_refused:
        told = r"the first (51|100|1,000) records are ACGTUN.*DNA or RNA"
        with pytest.raises(InputDataError, match=told) as caught:
            read(content)
        assert caught.value.options == {"allow_nucleotides": True}
    records, tally = read(content, allow_nucleotides=is_refused)
    assert len(records) == len(shares)
    assert tally.noted["record of the letters ACGTUN alone"] == shares.count(1)


def test_the_sample_is_read_like_by_biopython(tiny_fasta):
    tally = Tally()
    with gzip.open(tiny_fasta, "rt") as file:
        expected = list(SimpleFastaParser(file))
    records = list(read_records(tiny_fasta, tally))
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
    with pytest.raises(InputDataError, match="this is a comment") as caught:
        read(content)
    assert caught.value.options == {"allow_comments": True}


def test_a_header_after_white_space_is_accepted_only_at_the_beginning(read):
    """Text that the parser ignores must not be lost silently."""
    for start in (b"", b" \n\t ", b"; c\n", b"; c\n\n  "):
        records, tally = read(start + b">a\nMKV\n  >b\nMKL\n>c\nMKK\n", allow_comments=True)
        assert [r.identifier for r in records] == ["c"]
        line = start.count(b"\n") + 1
        assert tally.listed == {"'>' inside a line": [("a", "proteins.fasta", line)]}
        assert tally.records == 2


# A header, and what it tells: taxon, whether it is a fragment, and organism.
TOLD = [
    ("tr|A1|A1_X A (Fragment) OS=Ec (strain K12) OX=83333 GN=x", 83333, True, "Ec (strain K12)"),
    ("sp|P1|P1_X Actin OS=Homo sapiens GN=ACT PE=1 SV=1", None, False, "Homo sapiens"),
    ("sp|P1|P1_X Actin (Fragments) OS=Homo sapiens", None, True, "Homo sapiens"),
    ("sp|P1|P1_X Actin OS=X (Fragment) OX=12x PE=1", None, False, "X (Fragment)"),
    ("sp|P1|P1_X (Fragmentin) OS=X OX=7", 7, False, "X"),
    ("UniRef50_Q A (Fragment) n=4 Tax=Homo sapiens TaxID=9606 RepID=A", 9606, True, "Homo sapiens"),
    ("UniRef100_P1 Actin n=1 Tax=unidentified RepID=P1_X", None, False, "unidentified"),
    ("MyRef_P1 Actin n=1 Tax=Homo sapiens TaxID=9606", None, None, None),
    ("sp|P1|P1_X", None, None, None),
    ("mine OX=9606 (Fragment)", None, None, None),
]


@pytest.mark.parametrize(("header", "taxon", "is_fragment", "organism"), TOLD)
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


# --- annotation that looks like residues

# 60 residues of human titin, and others.
ONE = "MTTQAPTFTQPLQSVVVLEGSTATFEAHISGFPVPEVSWFRDGQVISTSTLPGVQISFSD"
TWO = "GRAKLTIPAVTKANSGRYSLKATNGSGQATSTAELLVKAETAPPNFVQRLQSMTVRQGSQ"
STATES = "DDDFDEDPAEDAAQFKFKADFDPDDDDDFFAKKFKAFVVPRHGAFMTGHPPDGD"
TOPOLOGY = "SSSSSSSSSSOOOOOOOOOOOOMMMMMMMMMMMMMMMMMMMMMIIIIIIIIIIIIIIIII"


def records(*pairs: tuple[str, str]) -> str:
    return "".join(f">p{number}\n{one}\n{two}\n" for number, (one, two) in enumerate(pairs))


THREE_LINES = {
    "DeepTMHMM": records((ONE, TOPOLOGY), (TWO[:45], TOPOLOGY[:45])),
    "one protein": records((ONE, TOPOLOGY)),
    "SignalP, cut to one length": records((ONE, "S" * 22 + "O" * 38), (TWO, "I" * 60)),
    "globular": records((ONE, "I" * 60)),
    "TMHMM": records((ONE, "i" * 20 + "M" * 20 + "o" * 20)),
    "three states": records((ONE, "CCCCEEEEEECCCHHHHHHHHHHHHCCC" * 2 + "CCCC")),
    "eight states": records((ONE, "TTTEEEEEESSSGGGHHHHHHHHHBTTT" * 2 + "EEEE")),
    "states with gaps": records((ONE, "---HHHHHHHH-----EEEEE---HHHHHH" * 2)),
    "masks": records((ONE, "0" * 20 + "1" * 40)),
    "unknown labels": records(*[(ONE[:n], ("Q" * 30 + "D" * 30)[:n]) for n in (60, 50, 40)]),
    "of one length": records(*[(ONE, "S" * n + "I" * (60 - n)) for n in (18, 20, 22)]),
    "burial": records(*[(one, "BEEBEEEBBE" * 6) for one in (ONE, TWO, ONE[::-1])]),
    "peptides": records(*[(ONE[n : n + 8], "BEEBEEEB") for n in range(9)]),
    "disorder": records((ONE, "D" * 60), (TWO, "D" * 20 + "S" * 40), (ONE[::-1], "S" * 60)),
    "two lines of labels": records((ONE, f"{TOPOLOGY}\n{'0' * 60}")),
    "wrapped": records((f"{ONE}\n{TWO[:9]}", f"{TOPOLOGY}\n{'M' * 9}")),
    "wrapped sequences": records((f"{ONE[:40]}\n{ONE[40:]}", TOPOLOGY)),
    "wrapped to one length": records((f"{ONE}\n{TWO}", f"{TOPOLOGY}\n{'O' * 60}")),
    "some without labels": records((ONE, TOPOLOGY)) * 2
    + f">p3\n{TWO}\n"
    + records((TWO, TOPOLOGY)),
    "with a fault": records(*[(ONE[:n], TOPOLOGY[:n]) for n in range(40, 60)]) + ">x\nMKV\n",
}
NAMED = {
    ":secstr": ">101M:A:sequence\nMVLSEGEWQ\n>101M:A:secstr\n   HHHHHH\n",
    ":disorder": ">101M:A:sequence\nMVLSEGEWQ\n>101M:A:disorder\nXXXXXXXXX\n",
    "_ss": f">p1\n{ONE}\n>p1_ss\n{'CCHHH' * 12}\n>p2\n{TWO}\n>p2_ss\n{'EEEEE' * 12}\n",
    "records of sec": f">p1 x\n{ONE}\n>p1:pred\nCCHH-\n{'C' * 55}\n>p2\n{TWO}\n>p2:pred\nHHHE\n",
    "3Di": f">p\n{ONE}\n>p_ss\n{STATES}\n>q\n{TWO}\n>q_ss\n{STATES}",
    "3Di states": f">p\n{STATES}\n>q\n{STATES.lower()}\n",
    "ss_pred": ">ss_pred PSIPRED\nCCHHHHH\n>ss_conf\n9999999\n>q\nMKVLLAA\n",
    "ss_dssp": ">ss_dssp\nCCHHHHH\n>aa_dssp\nMKVLLAA\n>q\nMKVLLAA\n",
    "PIR": ">P1;CRAB\nCrystallin alpha chain\nMDIAIHHPWI\nRRPF*\n",
    "PIR (NBRF)": ">P1;CRAB\nCrystallin alpha chain\nMDIAIHHPWI\nRRPF\n",
    "this is PIR": ">P1;CRAB\nsequence:CRAB::::\nMDIAIHHPWI\nRRPF\n>P1;B\nBeta 2\nMKV\n",
    "'>P1;ID'": ">F1;CRAB\nAlpha\nMDIAI\n>F1;B\nBeta\nMKV*\nC;Species: human\n",
}
NOT_PROTEINS = re.compile(r"(ss|aa)_|\S*:(secstr|disorder)|\S*[_:](ss|pred)")
LOW = ["Q", "S", "HHPHG", "TTTTPTTTTSTT", "EEELEEKLLE", "GPPGAP", "LLILLLIAVL", "sssppt"]
SEQUENCES = [
    *(records((ONE, (letters * 60)[:60])) for letters in LOW),
    records((ONE, TWO)),
    records((ONE, TWO), (TWO, ONE)),
    records((ONE, TWO), (TWO[:45], ONE[:45])),
    records((ONE, "S" * 60), (TWO, "T" * 60)),
    records(("MKTAYI", "HHHHHH"), ("MKVLLAGGAA", "GGGGSGGGGS")),
    records(*[(ONE, TWO[n:] + "G" * n) for n in range(20)]),
    records((f"{ONE}\n{TWO}", f"{ONE[::-1]}\n{TWO[::-1]}")),
    records((ONE, f"{TWO}\n{ONE}")),
    records(*[("MKVLW", "DEYRQ")] * 80),
    records((ONE, TWO[:9]), (TWO, ONE[:30])) + records((ONE, "S" * 60)),
    f">p\n{STATES[:-1]}\n>q\n{STATES}\n",
    ">p\nMKV\n>p_ss\nMKV\n>p_pred\nMKVHEC\n>q_class\nHEC\n",
    records(("MK", "VL"), ("MKV", "ILM")),
    ">P1\nMKV\nLLA*\n",
    ">P1 ;x\nMKV\nLLA*\n",
    ">P1;x\nMKV\nLLA\n",
    ">101M:A:sequence\nMVLSEGEWQ\n",
    ">x:disordered\nMVLSEGEWQ\n>x_disorder\nMKV\n",
    ">ss_prediction\nMKV\n",
]


@pytest.mark.parametrize("kind", [*THREE_LINES, *NAMED])
def test_annotation_is_refused_by_name_and_the_advice_leaves_the_sequences(read, tmp_path, kind):
    content = THREE_LINES.get(kind) or NAMED[kind]
    with pytest.raises(InputDataError) as caught:
        read(content.encode())
    message = str(caught.value)
    assert (kind if kind in NAMED else "in one line") in message
    if "awk" in message:
        (tmp_path / "FILE").write_text(content)
        command = ["awk", message.partition("awk '")[2].partition("'")[0], tmp_path / "FILE"]
        found, tally = read(subprocess.run(command, capture_output=True, check=True).stdout)
        proteins = [r for r in content[1:].split("\n>") if not NOT_PROTEINS.match(r)]
        rows = slice(2, None) if "PIR" in message else slice(1, 3 if "wrapped" in kind else 2)
        expected = ["".join(r.split("\n")[rows]).partition("*")[0] for r in proteins]
        assert [r.sequence for r in found] == expected
        assert found and not tally.rejected


def drawn(letters: str, number: int, size: int, separator: str = "") -> str:
    """Returns records of letters in random order."""
    rng = random.Random(number)
    return "".join(
        f">r{n}\n{separator.join(rng.choices(letters, k=size))}\n" for n in range(number)
    )


SAPROT = "".join(f">p{n}\n{''.join(a + 'dvp#'[n] for a in ONE)}\n" for n in range(4))
NO_RESIDUES = [
    (drawn("CEH", 1, 500), "letters CEH alone: these look like secondary structures"),
    (drawn("ech", 20, 100), "letters CEH alone"),
    (drawn("HECGIBTSP-", 5, 120), "letters -BCEGHIPST alone"),
    (drawn("-HE", 9, 100), "letters -EH alone"),
    (drawn("HTSGIP-", 20, 60), "letters -GHIPST alone"),
    (drawn("HL", 9, 100), "letters HL alone"),
    (drawn("EL", 1, 500), "in the first record there are the letters EL alone"),
    (drawn("H-", 9, 100), "letters -H alone"),
    (drawn("HE-", 1, 600), "letters -EH alone"),
    (drawn("CEHL", 5, 100), "letters CEHL alone"),
    (drawn("IMO", 10, 101), "letters IMO alone"),
    (drawn("01", 10, 101), "letters 01 alone"),
    (drawn("-D", 10, 300), "letters -D alone"),
    (SAPROT, "pairs of SaProt"),
    (drawn("ACGT-", 9, 100), "100% of the letters of the first 9 records are ACGTUN"),
    (drawn("ACUN", 1, 50), "looks like DNA or RNA"),
    (drawn("acgtACGTN-", 9, 60, "\n" * 2), "looks like DNA or RNA"),
    ("".join(f">d{n}\n{'ACGT' * 30}RYKM\n{'AC-GT' * 25}\n" for n in range(3)), "98% of the"),
    (drawn([*map(str, range(41))], 3, 40, " "), "qualities of bases"),
    (">r\n40 40 38\n 7 12\n", "qualities of bases"),
]
LOW_IN_COMPLEXITY = [
    f">p\n{'GPP' * 400}\n",
    f">p\n{'Q' * 1_200}\n",
    f">p\n{'GSPGTP' * 400}\n",
    f">p\n{'AAT' * 400}\n",
    f">p\n{'GA' * 400}\n",
    drawn("AT", 9, 100),
    ">p\nMkVlAaGgWw\n",
    drawn("CEH", 1, 499),
    drawn("GSAY", 9, 400),
    drawn("GSAY", 10, 99),
    drawn("GSAYV", 10, 400),
    "".join(f">p{n}\n{one * 40}\n" for n, one in enumerate([*LOW, "GA", "RS"])),
    ">p\nMk\n",
    ">p\nMkVlAaGgWwYy\n>q\nMKV\n",
]


@pytest.mark.parametrize("content", [*SEQUENCES, *LOW_IN_COMPLEXITY])
def test_sequences_that_look_like_other_files_are_read(read, content):
    found, tally = read(content.encode())
    assert len(found) == content.count(">") and not tally.rejected


@pytest.mark.parametrize(("content", "told"), NO_RESIDUES)
def test_letters_that_are_no_residues_are_refused(read, content, told):
    """By the first 1,000 records, whatever follows."""
    with pytest.raises(InputDataError) as caught:
        read(content.encode())
    assert told in str(caught.value) and "SignalP" not in str(caught.value)
    if "ACGTUN" in str(caught.value):
        assert read(content.encode(), allow_nucleotides=True, allow_gaps=True)[0]
    rows = content[1:].split("\n>")
    first = "".join(f">{rows[n % len(rows)].strip()}\n" for n in range(1_000))
    with pytest.raises(InputDataError, match=told[-15:]):
        read(f"{first}>p\n{ONE}\n".encode())


def test_the_advice_for_saprot_leaves_the_residues(read, tmp_path):
    with pytest.raises(InputDataError) as caught:
        read(SAPROT.encode())
    (tmp_path / "FILE").write_text(SAPROT)
    command = ["awk", str(caught.value).partition("awk '")[2].partition("'")[0], tmp_path / "FILE"]
    found, _ = read(subprocess.run(command, capture_output=True, check=True).stdout)
    assert [one.sequence for one in found] == [ONE] * 4


ROWS = ">101\nMKTAY\n>U\t0.9\nMK-Yi\n"


@pytest.mark.parametrize("first", ["#5\t1\n", "#5\t2\n", "#A3M#\n", "\n#A3M#\n\n", ""])
@pytest.mark.parametrize("last", ["", "\0", "\0\n", "\0#5\t1\n>102\nMKV\n\0", "\0>102\nMKV\n\0"])
@pytest.mark.parametrize("size", [1, 4 << 20])
def test_alignments_of_colabfold_and_the_mpi_toolkit(read, small_blocks, first, last, size):
    small_blocks(size)
    content = (first + ROWS + last).encode()
    found, tally = read(content, allow_gaps=True)
    assert [r.sequence for r in found] == ["MKTAY", "MKYI"] + ["MKV"] * ("102" in last)
    assert found[0].line == 1 + first.count("\n") and not tally.rejected
    assert read(content, allow_gaps=True, allow_comments=True) == (found, tally)
    if first or last:
        with pytest.raises(
            InputDataError, match=r"this is an alignment .*remove its gaps"
        ) as caught:
            read(content)
        assert caught.value.options == {"allow_gaps": True}


@pytest.mark.parametrize("option", ["allow_gaps", "allow_comments", "allow_nucleotides"])
def test_an_alignment_of_a_complex_is_refused(read, option):
    with pytest.raises(InputDataError, match=r"line 1: .*several chains"):
        read(f"#2,3\t1,1\n{ROWS}".encode(), **{option: True})
