"""Variants: their notation, and tables and reference files of ProteinGym and of people."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from protlm.downstream.variants import (
    Assay,
    Variant,
    parse_mutant,
    parse_sequence,
    read_reference,
    read_variants,
)
from protlm.system.errors import InputDataError

WILD_TYPE = "MKTAYIAK"


def written(folder: Path, text: str, name: str = "v.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_substitution_assay(tmp_path: Path) -> None:
    header = "mutant,mutated_sequence,DMS_score,DMS_score_bin"
    text = f"{header}\nM1A,AKTAYIAK,0.5,1\nK2R:T3S,MRSAYIAK,NA,\nM1D,DKTAYIAK,-1,0\n"
    table = read_variants(written(tmp_path, text), WILD_TYPE)
    in_capitals = written(tmp_path, text.replace(header, header.upper()), "capitals.csv")
    again = read_variants(in_capitals, WILD_TYPE)
    assert (again.columns, again.variants) == (header.split(","), table.variants)
    assert table.variants == [parse_mutant(one, WILD_TYPE) for one in ("M1A", "K2R:T3S", "M1D")]
    np.testing.assert_array_equal(table.measured, [0.5, np.nan, -1])
    assert table.is_fit.tolist() == [True, False, False]
    assert table.rows[1] == ["K2R:T3S", "MRSAYIAK", "NA", ""]


def test_an_indel_assay(tmp_path: Path) -> None:
    text = "mutant,mutated_sequence\nMKTAYIAKK,MKTAYIAKK\n,MKTAYIAK\nMRTAYIAK,MRTAYIAK\n"
    text += "p.Lys2delinsArg,MRTAYIAK\nM1W,\n"
    table = read_variants(written(tmp_path, text), WILD_TYPE)
    assert table.variants == [
        Variant(indel="MKTAYIAKK"),
        Variant(),
        *(parse_mutant(one, WILD_TYPE) for one in ("K2R", "K2R", "M1W")),
    ]
    assert table.measured is None and table.is_fit is None


def test_tabs_gzip_and_byte_order_marks_are_read(tmp_path: Path) -> None:
    plain = read_variants(written(tmp_path, "mutant,x\nM1A,1\n"), WILD_TYPE)
    tabs = tmp_path / "t.tsv.gz"
    tabs.write_bytes(gzip.compress("\ufeffmutant\tx\r\nM1A\t1\r\n\r\n".encode()))
    assert read_variants(tabs, WILD_TYPE) == plain


WRONG = {
    "another protein": ("mutant\nM1A\nA2P\n", "line 3: A2P: position 2 of the wild type is K"),
    "two columns that differ": (
        "mutant,mutated_sequence\nM1A,MRTAYIAK\n",
        "line 2: mutated_sequence has M at position 1, and by M1A it is A",
    ),
    "substitutions of a longer sequence": (
        "mutant,mutated_sequence\nM1A,AKTAYIAK\nM1A,AKTAYIAKK\n",
        "line 3: mutated_sequence has 9 residues, and by M1A it has 8",
    ),
    "a repeated column": (
        "mutant,DMS_score,x,,,DMS_score,mutant\nM1A,1,,,,2,M1C\n",
        "several columns of the name DMS_score, mutant;",
    ),
    "an unknown residue": ("mutant\nM1A\nK2X\n", "line 3: K replaced by X has no score"),
    "no column": ("name,score\nM1A,1\n", "columns name, score; name one of them mutant"),
    "other values": (
        "mutant,DMS_score\nK2R,1\nk2r,2\n",
        "line 3: DMS_score is 2, and in line 2, of",
    ),
    "no row that fits": ("mutant\nA2P\na3p\n", "K, not A, line 3: a3p: position 3 of the wild"),
    "no row": ("mutant\n", "has no variants"),
    "an empty row": ("mutant,x\n,1\n", "line 2: there is neither a mutant nor"),
    "a row too long": ("mutant\nM1A,1\n", "line 2: 2 fields, not the 1 of the header"),
    "no residue": ("mutated_sequence\nMK-AYIAK\n", "line 2: mutated_sequence is rejected: gap"),
    "decimal commas": ("mutant;DMS_score\nM1A;0,5\n", "line 2: DMS_score of variant 1 is '0,5'"),
    "other digits": ("mutant,DMS_score\nM1A,1_0\n", "is '1_0', not a number with a decimal point"),
    "a letter that is none": ("mutant\nm\u01311a\n", "'m\u01311a' is not a substitution"),
    "an endless header": (
        "mutant," + "x" * 200_000 + "\nM1A,1\n",
        "line 1: a cell has over 131,072",
    ),
    "an infinite number": ("mutant,DMS_score\nM1A,inf\n", "DMS_score of variant 1 is 'inf'"),
    "a missing bin": (
        "mutant,DMS_score,DMS_score_bin\nM1A,NA,\n\nM1C,1,1\nM1D,2,\n",
        "line 5: DMS_score_bin is empty, and DMS_score is not",
    ),
    "no number": ("mutant,DMS_score\nM1A,high\n", "DMS_score of variant 1 is 'high', not a number"),
}


NOTATIONS = {
    ("M1A", "Met1Ala", "p.Met1Ala", "p.(Met1Ala)", "p.M1A", "NP_000537.3:p.Met1Ala"): "M1A",
    ("K2R:T3S", "p.[Lys2Arg;Thr3Ser]", "p.[(K2R);(T3S)]", "Lys2Arg:Thr3Ser"): "K2R:T3S",
    ("K2K", "K2=", "p.Lys2="): "K2K",
    ("_wt", "WT", "wt", "p.=", "p.(=)", "=", "_sy", "synonymous"): "",
}
UNREADABLE = ["p.Trp2Ter", "K2*", "p.Lys2fs", "p.Met1del", "c.4A>T", "p.[M1A];[K2R]", "A9P", "K2X"]


def test_notations_of_laboratories(tmp_path: Path) -> None:
    for notations, meant in NOTATIONS.items():
        table = read_variants(written(tmp_path, "\n".join(["mutant", *notations])), WILD_TYPE)
        expected = parse_mutant(meant, WILD_TYPE) if meant else Variant()
        assert table.variants == [expected] * len(notations) and not table.unscored


@pytest.mark.parametrize("name", ["hgvs_pro", "Variant", "mutation"])
def test_the_metrics_leave_out_the_wild_type_and_repeated_variants(name, tmp_path: Path) -> None:
    rows = "p.Met1Ala,1\np.Lys2=,2\n_wt,5\nK2R,3\nk2r,3\n"
    table = read_variants(written(tmp_path, f"{name},score\n{rows}"), WILD_TYPE, label="score")
    assert len(table.variants) == 5 and table.measured is not None
    np.testing.assert_array_equal(table.measured, [1, np.nan, np.nan, 3, np.nan])
    assert table.notes[0] == f"mutants from the column {name.lower()}"
    assert table.notes[1].startswith("rows of the wild type, synonymous or repeated, ")
    assert table.notes[1].endswith(": 3")


@pytest.mark.parametrize(("first", "shift"), [(1, -1), (1, 1), (30, -30)])
def test_another_number_of_the_first_residue_is_named(
    first: int, shift: int, tmp_path: Path
) -> None:
    rows = [f"{one}{first + shift + n}W" for n, one in enumerate(WILD_TYPE)]
    path = written(tmp_path, "\n".join(["mutant", *rows]))
    with pytest.raises(InputDataError, match=f"rows fit if the first residue is {first + shift};"):
        read_variants(path, WILD_TYPE, first_residue=first, skip_invalid=True)


def test_all_rows_that_cannot_be_scored_are_named_or_skipped(tmp_path: Path) -> None:
    rows = [
        f"{one},{number},{number % 2}" for number, one in enumerate(["M1A", *UNREADABLE, "T3S"])
    ]
    path = written(tmp_path, "\n".join(["mutant,DMS_score,DMS_score_bin", *rows]))
    words = (
        r"8 of 10 rows cannot .*line 3: 'p.Trp2Ter' .*, line 4: .* \(write it as A1P .*\); "
        r"line 6: .* \(to score insertions .*\); \.\.\.; .*leave their scores empty"
    )
    with pytest.raises(InputDataError, match=words):
        read_variants(path, WILD_TYPE)
    table = read_variants(path, WILD_TYPE, skip_invalid=True)
    assert table.variants == [parse_mutant(one, WILD_TYPE) for one in ("M1A", "T3S")]
    assert (table.scored, len(table.unscored), len(table.rows)) == ([0, 9], 8, 10)
    assert (table.measured.tolist(), table.is_fit.tolist()) == ([0, 9], [False, True])


def test_sequences_are_rejected_as_in_fasta_files(tmp_path: Path) -> None:
    text = "mutated_sequence\nMKTAYIAK*\nMKT*YIAK\nmrtayiak\nMKTA-IAK\n"
    table = read_variants(written(tmp_path, text), WILD_TYPE)
    assert table.variants == [Variant(), parse_mutant("K2R", WILD_TYPE)] and table.scored == [0, 2]
    assert table.describe_unscored(Path("x")).endswith("mutated_sequence is rejected: gap")


@pytest.mark.parametrize(("text", "words"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said_with_its_line(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputDataError) as refused:
        read_variants(written(tmp_path, text), WILD_TYPE)
    assert words in str(refused.value)
    assert "v.csv" in str(refused.value)


def test_a_reference_file(tmp_path: Path) -> None:
    text = (
        "DMS_id,DMS_filename,UniProt_ID,target_seq,coarse_selection_type\n"
        "A_2020,A_2020.csv,A_HUMAN,mktayiak,Stability\n"
    )
    path = written(tmp_path, text)
    assert read_reference(path) == {"A_2020": Assay(WILD_TYPE, "A_HUMAN", "Stability")}
    plain = written(tmp_path, "DMS_id,target_seq\nA_2020,MKTAYIAK\n", "plain.csv")
    assert read_reference(plain) == {"A_2020": Assay(WILD_TYPE, "A_2020", "")}
    header, row = text.splitlines()
    capitals = written(tmp_path, f"{header.upper()}\n{row}\n", "capitals.csv")
    assert read_reference(capitals) == read_reference(path)
    for text, words in (
        ("DMS_id\nA\n", "has no column target_seq"),
        ("DMS_id,target_seq\nA,MK\nB,MK\nA,MT\n", "line 4: the DMS_id A is in an earlier line"),
        ("DMS_id,target_seq,DMS_id\nA,MK,B\n", "several columns of the name DMS_id"),
    ):
        with pytest.raises(InputDataError, match=words):
            read_reference(written(tmp_path, text))
    rejected = written(tmp_path, "DMS_id,target_seq\nA,MK1\nB,MKT*\n")
    with pytest.warns(UserWarning, match="line 2: A is left out, target_seq: digit"):
        assert read_reference(rejected) == {"B": Assay("MKT", "B", "")}


def test_sequences_are_compared_with_the_wild_type() -> None:
    assert parse_sequence("aktayiaw", WILD_TYPE) == parse_mutant("M1A:k8w", WILD_TYPE)
    assert parse_sequence(WILD_TYPE, WILD_TYPE) == Variant()
    for indel in ("MKTYIAK", "MKTAAYIAK"):
        variant = parse_sequence(indel, WILD_TYPE)
        assert variant == Variant(indel=indel)
        assert variant.apply(WILD_TYPE) == indel


NOT_SUBSTITUTIONS = {
    "p.Ala1Pro": "Ala1Pro: position 1 of the wild type is M, not A",
    "p.Lys3del": "'p.Lys3del' is not a substitution; to score insertions and deletions, add",
    "K9P": "position 9 does not exist, the wild type has the residues 1 to 8",
    "M0P": "position 0 does not exist",
    "M1A:M1C": "replaces position 1 more than once",
    "M1J": "M1J: 'J' at residue 1 is not one of",
    "M1": "'M1' is not a substitution; write it as A1P",
    "M\u0661A": "is not a substitution",
    f"M{'1' * 5000}A": "is not a substitution",
    "M1X": "M replaced by X has no score, as X is not one of the 20 amino acids",
    "M1*": "'M1*' is not a substitution but a stop",
    "M1A,K2R": "several as A1P:D2N",
}


@pytest.mark.parametrize("text", NOT_SUBSTITUTIONS)
def test_other_notations_are_refused(text: str) -> None:
    with pytest.raises(InputDataError) as refused:
        parse_mutant(text, WILD_TYPE)
    assert NOT_SUBSTITUTIONS[text] in str(refused.value)


@pytest.mark.parametrize("letter", "XBZUO")
def test_only_the_20_amino_acids_are_replaced_and_replace(letter: str) -> None:
    words = f"{letter} is not one of the 20 amino acids"
    for text, wild_type in ((f"K2{letter}", "MKT"), (f"{letter}2K", f"M{letter}T")):
        with pytest.raises(InputDataError, match=words):
            parse_mutant(text, wild_type)
    for sequence, wild_type in ((f"M{letter}T", "MKT"), ("MKT", f"M{letter}T")):
        with pytest.raises(InputDataError, match=words):
            parse_sequence(sequence, wild_type)
    assert parse_sequence(f"A{letter}T", f"M{letter}T").substitutions == (("M", 0, "A"),)


def test_the_first_residue_can_have_another_number() -> None:
    """Also in messages."""
    assert parse_mutant("K25R", WILD_TYPE, first_residue=24) == parse_mutant("K2R", WILD_TYPE)
    for text, words in (
        ("A24P", "position 24 of the wild type is M, not A"),
        ("M1P", "residues 24 to 31"),
    ):
        with pytest.raises(InputDataError, match=words):
            parse_mutant(text, WILD_TYPE, first_residue=24)
