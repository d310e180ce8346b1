"""Files of relatives: every form that people have, every trap, and every refusal."""

import gzip
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from protlm.data.families import draw, num_neighbors, read_family, reading
from protlm.data.records import Record
from protlm.options.relatives import FamilyOptions, RelativesOptions
from protlm.system.errors import InputDataError, UserError
from tests.data.families.conftest import QUERY, fasta

FILES = Path(__file__).resolve().parents[2] / "data_files"

ROW = "MKTAYLAKQRQLSFVKSHFS"
# Two insertions after the fourth residue, and two residues of the query without a partner.
INSERTED, UNGAPPED = "MKTAggYLAK--QLSFVKSHFS", "MKTAGGYLAKQLSFVKSHFS"
A3M = fasta(QUERY, ROW, INSERTED)
A2M = fasta("MKTA..YIAKQRQISFVKSHFS", "MKTA..YLAKQRQLSFVKSHFS", INSERTED)
DOTS = fasta("MKTA..YIAKQRQISFVKSHFS", "MKTA..YLAKQRQLSFVKSHFS", INSERTED.upper().replace("-", "."))
HHBLITS = f">ss_pred\nCCCHHHHHHHHHHHHHHHHC\n>ss_conf\n98765432109876543210\n>ss_dssp\n{'-' * 20}\n"
STOCKHOLM = """# STOCKHOLM 1.0
#=GF ID   family
#=GS a/3-22 AC P1

q        MKTA..YIAK
a/3-22   MKTA..YLAK
#=GR a/3-22 SS ....CCCCHH
b/1-20   MKTAggYLAK
#=GC RF  xxxx..xxxx

q        QRQISFVKSHFS
a/3-22   QRQLSFVKSHFS
b/1-20   --QLSFVKSHFS
#=GC SS_cons HHHHHHHHHHHH
//
"""
COLUMNS_A = list(range(20))
COLUMNS_B = [0, 1, 2, 3, 3, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
BOTH = {"a": (ROW, 0.9, COLUMNS_A), "b": (UNGAPPED, 0.8, COLUMNS_B)}
STO = {"a/3-22": BOTH["a"], "b/1-20": BOTH["b"]}
SUFFIX = "\t150\t0.312\t1.2E-20\t0\t19\t20\t0\t19\t20"

# The text, the relatives (residues, identity, columns), and words of what is said.
READ = {
    "A3M of ColabFold": ("#20\t1\n" + A3M, BOTH, "an alignment of 3 rows, the first the query"),
    "A3M of the MPI toolkit": ("#A3M#\n" + A3M, BOTH, "3 rows"),
    "its last byte": ("#20\t1\n" + A3M + "\0", BOTH, "3 rows"),
    "headers of ColabFold": (
        A3M.replace(">a", f">a{SUFFIX}"),
        BOTH,
        "weights: 1/neighbors at 80 % identity",
    ),
    "HHblits": (HHBLITS + A3M, BOTH, "3 annotation of HH-suite"),
    "annotation between rows": (A3M + HHBLITS, BOTH, "left out: 3 annotation of HH-suite"),
    "a name of HH-suite": ("#family one\n" + A3M, BOTH, "3 rows"),
    "a consensus first": (
        fasta(ROW, names="C").replace("C", "q_consensus") + A3M,
        BOTH,
        "an alignment of 4 rows, row 2 the query: 2 relatives.*1 consensus",
    ),
    "the query is not the first": (
        fasta(ROW, INSERTED, QUERY, names="abq"),
        BOTH,
        "an alignment of 3 rows, row 3 the query",
    ),
    "A2M": (A2M, BOTH, "3 rows"),
    "padded in part": (fasta("MKTA.." + QUERY[4:], ROW, INSERTED), BOTH, "3 rows"),
    "aligned FASTA": (DOTS.replace(".", "-"), BOTH, "3 rows"),
    "dots for gaps": (DOTS, BOTH, "3 rows"),
    "soft masks": (DOTS.replace("SHFS", "shfs").replace("MKTA..", "mkta--", 1), BOTH, "3 rows"),
    "Stockholm": (STOCKHOLM, STO, "3 rows"),
    "Stockholm of dots": (STOCKHOLM.replace("gg", "GG").replace("--", ".."), STO, "3 rows"),
    "unaligned": (
        fasta(ROW, UNGAPPED, names="ab"),
        {"a": (ROW, None, None), "b": (UNGAPPED, None, None)},
        r"unaligned sequences .2.: 2 relatives .weights: uniform",
    ),
    "one of them": (
        f">a{SUFFIX}\n{ROW}\n>b\n{UNGAPPED}\n",
        {"a": (ROW, 0.312, None), "b": (UNGAPPED, None, None)},
        "2 relatives",
    ),
    "unaligned with identities": (
        f">a{SUFFIX}\n{ROW}\n",
        {"a": (ROW, 0.312, None)},
        r"unaligned sequences .1.: 1 relative .weights: uniform.$",
    ),
    "other letters": (
        fasta(QUERY + "*", "MKTAJLAKQRQUSFVKSHF-*", "MKTA-LAKQRQ1SFVKSHFS-"),
        {"a": ("MKTAXLAKQRQUSFVKSHF", 0.8, COLUMNS_A[:-1])},
        "left out: 1 digit",
    ),
}


@pytest.mark.parametrize(("text", "relatives", "said"), READ.values(), ids=READ)
def test_every_form_is_read(read, text, relatives, said) -> None:
    for content in (text.encode(), gzip.compress(text.encode())):
        family = read(content)
        assert (family.query, family.name) == (QUERY, "Q1")
        assert re.search(said, str(family))
        assert [one.name for one in family.relatives] == list(relatives)
        for one in family.relatives:
            residues, identity, columns = relatives[one.name]
            assert one.residues == residues
            assert one.identity == (identity if identity is None else pytest.approx(identity))
            assert (one.columns if columns is None else one.columns.tolist()) == columns


def test_positions_are_those_of_a_query_with_gaps_and_insertions(read) -> None:
    rows = fasta("MGKV-LA", "eMGKVWLA", "M-KV-wLA", "M-KV-LAgg", names="abqc")
    family = read(rows, "MKVWLA")
    assert {one.name: one.columns.tolist() for one in family.relatives} == {
        "a": [0, 0, 1, 2, 4, 5],
        "b": [0, 0, 0, 1, 2, 2, 4, 5],
        "c": [0, 1, 2, 4, 5, 5, 5],
    }
    # What stands where the query has a gap, or an insertion, is not one of its residues.
    assert [one.letters.tobytes() for one in family.relatives] == [b"MKV\0LA"] * 3
    assert [one.identity for one in family.relatives] == pytest.approx([5 / 6] * 3)


def test_the_first_row_is_the_query_if_none_is_given(read) -> None:
    assert (
        read(fasta(ROW, names="Consensus").replace("C\n", "Consensus\n") + A3M, None).query == QUERY
    )
    assert read(HHBLITS + A3M, None).query == QUERY
    # Rows of one length without gaps are an alignment by the name of the file alone.
    assert read(fasta(QUERY, ROW), None, "family.a3m").relatives[0].identity == 0.9


DI = "DPVVVVVVVLVVVVPDDVVQLVVCVVVVHDD"
REFUSED = {
    "another query": (
        fasta(ROW, INSERTED),
        "no row of the alignment is the query Q1 of 20 residues; its first row, q of 20, differs "
        "from residue 6 on.*give the alignment of this sequence, the residues of q in the",
    ),
    "a part of the query": (fasta(QUERY[:9], "MKTA-IAKQ"), "q of 9, is a part of it, from res"),
    "unequal columns": (
        fasta(QUERY, ROW, INSERTED + "-"),
        "q has 20 columns, and b, line 5, has 21; give sequences that are not aligned as FASTA",
    ),
    "a soft mask in sequences": (
        fasta(ROW[:12] + ROW[12:].lower(), UNGAPPED + "AA"),
        "q has 12 columns, and a, line 3, has 22; give sequences that are not aligned as FASTA",
    ),
    "lower case alone": (
        fasta(QUERY.lower(), ROW.lower() + "ss"),
        "q has 0 columns, and q, line 1, has 0",
    ),
    "a complex": ("#10,10\t1,1\n" + A3M, "line 1: this is an alignment of a complex"),
    "alignments of MMseqs2": (
        A3M + "\0" + A3M,
        "line 7: several alignments are in this file; give one file for each query",
    ),
    "alignments of ColabFold": ("#20\t1\n" + A3M + "#20\t1\n" + A3M, "line 8: several alignments"),
    "alignments of Pfam": (STOCKHOLM + STOCKHOLM, "line 16: several alignments"),
    "truncated Stockholm": (STOCKHOLM[:-4], r"line 14: .*does not end with //; it is truncated"),
    "odd Stockholm": (STOCKHOLM.replace("  MK", " x MK", 1), "line 5: .* is not a name and its"),
    "contexts of E1": (fasta(f"{ROW},{QUERY}"), "line 1: there is a ',' in the sequence.*E1"),
    "annotation alone": (HHBLITS, "no record"),
    "nothing usable": (">a\nM1\n>b\n--\n", "none of its records .*: 1 digit, 1 blank sequence"),
    "nucleotides": (fasta("ACGTACGTAC" * 9 + "--", "ACGTAAGTAC" * 9 + "--"), "DNA or RNA"),
    "3Di": (fasta(*[DI] * 4), "3Di states of Foldseek"),
    "clusters": ("P1\tP2\n", "this is a table"),
    "labels": ("accession,label\nP1,a\n", "this is a table"),
    "Clustal": ("CLUSTAL W\n", "Clustal alignment; relatives are read from A3M, A2M, Stockholm"),
    "JSON": ('{"a": 1}', "this is JSON"),
    "nothing": ("", "the file is empty"),
}


@pytest.mark.parametrize(("text", "said"), REFUSED.values(), ids=REFUSED)
def test_other_files_are_refused_with_a_sentence(read, text, said) -> None:
    with pytest.raises(InputDataError, match=rf"(?s)family\.fasta.*{said}"):
        read(text)


UNALIGNED = fasta(ROW, UNGAPPED, names="ab")
OPTIONS = {
    "no query": (UNALIGNED, {"query": None}, "not aligned .*give the query beside them", {}),
    "weights": (UNALIGNED, {"weights": "neighbors"}, "draw them uni", {"weights": "uniform"}),
    "identities": (
        UNALIGNED,
        {"max_identity": 0.9},
        "identities to the query are not known",
        {"min_identity": None, "max_identity": None},
    ),
    "coverage": (UNALIGNED, {"min_coverage": 0.9}, "how much of the query", {"min_coverage": None}),
    "an identity": (
        f">a{SUFFIX}\n{ROW}\n>b\n{UNGAPPED}\n",
        {"max_identity": 0.9},
        "not known without an alignment, a table or headers that have them of all relatives",
        {"min_identity": None, "max_identity": None},
    ),
    "none is left": (
        fasta(QUERY, QUERY[:-1] + "-"),
        {},
        "0 relatives .*; left out: 1 inside the query. No relative is left for the query Q1",
        {"allow_none": True},
    ),
}


@pytest.mark.parametrize(("text", "given", "said", "options"), OPTIONS.values(), ids=OPTIONS)
def test_a_refusal_has_the_option_that_helps(read, text, given, said, options) -> None:
    """By the names of fields: a library speaks Python."""
    with pytest.raises(InputDataError, match=said) as error:
        read(text, **given)
    assert error.value.options == options
    assert "--" not in str(error.value)


LONG = "ACDEFGHIKLMNPQRSTVWY" * 2
# With a substitution in the middle, so that no end of it is inside the query.
HALF = LONG[20:30] + "W" + LONG[31:]
LOW = "aligned to less than 50% of the query"
# The rows, the options, and the reason for which the last is left out; "" if it is taken.
FILTERS = {
    "equal": ([LONG], {}, "equal to the query"),
    "an insertion": ([LONG[:20] + "g" + LONG[20:]], {}, ""),
    "a fragment": (["-" * 10 + LONG[10:]], {}, "inside the query"),
    "a tag": (["gshmg" + LONG], {}, "around the query"),
    "a tag and a lost end": (["gshmg" + LONG[:-2] + "--"], {}, "around the query"),
    "another end": (["gshmg" + LONG[:-3] + "---"], {}, ""),
    "a substitution": ([LONG[:20] + "Y" + LONG[21:]], {}, ""),
    "repeated": ([LONG[:20] + HALF, LONG[:20] + HALF], {}, "repeated"),
    "half": (["-" * 20 + HALF], {}, ""),
    "less than half": (["-" * 21 + HALF[1:]], {}, LOW),
    # Insertions cover nothing.
    "insertions": (["-" * 21 + "w" * 9 + HALF[1:]], {}, LOW),
    "lower coverage": (["-" * 21 + HALF[1:]], {"min_coverage": 0.4}, ""),
    "too long": ([LONG[:20] + HALF], {"max_residues": 39}, "longer than 39 residues"),
    "too short": (["-" * 4 + LONG[4:20] + HALF], {"min_residues": 37}, "shorter than 37 residues"),
    "unknown": (["X" * 5 + LONG[5:]], {}, "with more than 10% of X"),
    "few unknown": (["X" * 4 + LONG[4:]], {}, ""),
    "not identical enough": (["W" * 9 + LONG[9:]], {"min_identity": 0.8}, "below 80% identity"),
    "just identical enough": (["W" * 8 + LONG[8:]], {"min_identity": 0.8}, ""),
    # A gap is no match, and the query's residues are what is divided by.
    "gaps": (["-" * 8 + LONG[8:20] + HALF], {"min_identity": 0.8}, "below 80% identity"),
    "too identical": (["W" * 3 + LONG[3:]], {"max_identity": 0.9}, "above 90% identity"),
    "just as identical": (["W" * 4 + LONG[4:]], {"max_identity": 0.9}, ""),
}


@pytest.mark.parametrize(("rows", "options", "reason"), FILTERS.values(), ids=FILTERS)
def test_filters_count_what_they_leave_out(read, rows, options, reason) -> None:
    # A row with a gap, which is inside the query, makes it an alignment.
    family = read(fasta(LONG, *rows, "-" + LONG[1:]), LONG, allow_none=True, **options)
    assert family.counts == Counter(["inside the query", *filter(None, [reason])])
    assert len(family.relatives) == len(family.weights) == len(rows) - bool(reason)


@pytest.mark.parametrize("own", ["sp|Q1|X", "Q1/2-9"])
def test_the_query_is_known_by_its_name_and_by_what_is_known_of_it(read, own: str) -> None:
    text = f">{own}\n{UNGAPPED}\n>b\n{QUERY}\n>c\nMG{QUERY}\n>d\n{ROW}\n"
    family = read(text, QUERY[:5] + "X" + QUERY[6:])
    assert [one.name for one in family.relatives] == ["d"]
    kinds = {"with the name of the query": 1, "inside the query": 1, "around the query": 1}
    assert family.counts == kinds


def test_all_rows_are_relatives_of_a_new_protein(read) -> None:
    family = read(A3M, "")
    first, *others = family.relatives
    assert (family.query, first.residues, first.columns.tolist()) == ("", QUERY, COLUMNS_A)
    assert [one.name for one in others] == list(BOTH)
    assert "an alignment of 3 rows, the first gives the columns" in str(family)


def test_what_belongs_to_a_relative_stays_with_it_after_filters(read) -> None:
    copies = ["W" + QUERY[1:10] + one + QUERY[11:] for one in "CDE"]
    rows = [
        "-" + QUERY[1:],
        *copies[:2],
        "-" * 11 + QUERY[11:15] + "WWWWW",
        ROW[:17] + "WWW",
        copies[2],
    ]
    family = read(fasta(QUERY, *rows))
    assert [one.name for one in family.relatives] == ["b", "c", "e", "f"]
    for one in family.relatives:
        assert one.letters.tobytes().strip(b"\0").decode() == one.residues
    assert family.weights.tolist() == pytest.approx([1 / 3, 1 / 3, 1, 1 / 3])


def test_limits_are_fractions_and_need_relatives() -> None:
    with pytest.raises(UserError, match=r"min_coverage=1\.1 must be at least 0 and at most 1"):
        FamilyOptions(min_coverage=1.1)
    with pytest.raises(UserError, match="contexts has no effect without relatives"):
        RelativesOptions(None, FamilyOptions(contexts=2))


def test_whole_proteins_are_found_by_their_names(read, tmp_path: Path) -> None:
    proteins = tmp_path / "proteins.fasta"
    proteins.write_text(f">a\n{ROW}WW{ROW}W\n>sp|P1|B_X b\nW{UNGAPPED}\n>c\nMKV\n>z\nMKV\n")
    rows = A3M.replace(">a", ">a/23-42").replace(">b", ">tr|P1|B_X/2-21")
    rows += fasta("MKTAYLAKQRQLSFVKSWFS", "MKTAYLAKQRQLSFVKSHWS", names="cd")
    family = read(rows, whole_relatives=proteins)
    assert {one.name: (one.residues, one.columns.tolist()) for one in family.relatives} == {
        "a/23-42": (f"{ROW}WW{ROW}W", [*range(-22, 0), *COLUMNS_A, 20]),
        "P1": (f"W{UNGAPPED}", [-1, *COLUMNS_B]),
    }
    assert family.counts == {"other than in proteins.fasta": 1, "not in proteins.fasta": 1}
    unaligned = read(fasta(ROW[3:], "MKV", names="ad"), whole_relatives=proteins)
    assert unaligned.relatives == (("a", f"{ROW}WW{ROW}W", None, None, None),)
    proteins.write_text(f">a\n{ROW}\n>a\n{ROW}W\n")
    with pytest.raises(InputDataError, match="line 3: a is there with another sequence"):
        read(rows, whole_relatives=proteins)


def test_sequences_of_a_program_are_a_family(read) -> None:
    rows = [("q", QUERY), ("a", ROW), ("b", INSERTED)]
    family, same = read_family(rows, QUERY), read_family(rows[::-1], QUERY)
    assert [one.name for one in family.relatives] == ["a", "b"]
    assert family.digest == same.digest != read_family(rows[:2], QUERY).digest
    for seed in range(5):
        found = [draw(one, number=0, tokens=99, seed=seed).names for one in (family, same)]
        assert found[0] == found[1]
    assert [one.name for one in read_family([ROW, UNGAPPED], QUERY).relatives] == [
        "relative 1",
        "relative 2",
    ]
    record = Record("P1", "P1 protein", ROW, 1)
    assert read_family([record], QUERY).relatives[0] == ("P1", ROW, None, None, None)
    with pytest.raises(InputDataError, match="relative 2 is refused: digit"):
        read_family([ROW, "M1"], QUERY)


def test_of_very_many_relatives_some_are_taken_by_chance(read, monkeypatch) -> None:
    monkeypatch.setattr(reading, "MOST_RELATIVES", 3)
    rows = [QUERY[:place] + "W" + QUERY[place + 1 :] for place in range(9)]
    family = read(fasta(QUERY, *rows, names="qabcdefghi") + f">z\n-{ROW[1:]}\n")
    assert len(family.relatives) == 3
    assert family.counts == {"by chance, beyond 3": 6, "inside the query": 1}
    assert [one.name for one in family.relatives] == sorted(one.name for one in family.relatives)


def naive_neighbors(letters: np.ndarray) -> list[int]:
    """Counts neighbors of every row as the definition says."""
    number = []
    for one in letters:
        agreeing = ((letters == one) & (one != 0)).sum(1)
        shorter = np.minimum((letters != 0).sum(1), (one != 0).sum())
        number.append(sum(5 * a >= 4 * max(n, 1) for a, n in zip(agreeing, shorter, strict=True)))
    return np.maximum(number, 1).tolist()


@pytest.mark.parametrize("columns", [10, 300, 600])
def test_neighbors_are_counted_in_tiles_as_they_are_defined(monkeypatch, columns: int) -> None:
    monkeypatch.setattr("protlm.data.families.family._ROWS", 16)
    rng = np.random.default_rng(columns)
    letters = rng.integers(65, 70, (5, columns), np.uint8)[rng.integers(0, 5, 75)]
    changed = rng.random(letters.shape) < rng.choice([0.0, 0.1, 0.2], (75, 1))
    letters = np.where(changed, rng.integers(65, 70, letters.shape), letters).astype(np.uint8)
    letters[rng.random(letters.shape) < rng.choice([0.0, 0.5, 1.0], (75, 1), p=[0.6, 0.3, 0.1])] = 0
    number = num_neighbors(letters)
    assert number.tolist() == naive_neighbors(letters)
    assert len({*number.tolist()}) > 3


def test_real_alignments_are_read() -> None:
    family = read_family(FILES / "4CCV_A.a3m.gz", None)
    assert [one.name for one in family.relatives] == ["P04196", "Q9ESB3", "Q99PS8", "P33433"]
    assert family.counts == {"equal to the query": 1}
    assert family.relatives[0].columns[69:75].tolist() == [69, 70, 71, 71, 72, 73]
    seed = read_family(FILES / "PF00032_seed.sto", None)
    assert [one.name for one in seed.relatives][:2] == ["PETD_NOSSP/65-160", "PETD_CHLEU/65-160"]
    # Counted in the file.
    assert seed.relatives[0].identity == pytest.approx(76 / 96)
