"""Notation of variants: what is parsed, and what is refused with the position and the residue."""

import pytest

from protlm.downstream.variants import Substitution, Variant, parse_mutant, parse_sequence
from protlm.system.errors import InputDataError

WILD_TYPE = "MKTAYIAK"


def test_substitutions_count_from_one() -> None:
    variant = parse_mutant("M1A:k8w", WILD_TYPE)
    assert variant.substitutions == (Substitution("M", 0, "A"), Substitution("K", 7, "W"))
    assert variant.apply(WILD_TYPE) == "AKTAYIAW"


def test_the_first_residue_can_have_another_number() -> None:
    variant = parse_mutant("K25R", WILD_TYPE, first_residue=24)
    assert variant == parse_mutant("K2R", WILD_TYPE)


def test_sequences_are_compared_with_the_wild_type() -> None:
    assert parse_sequence("aktayiaw", WILD_TYPE) == parse_mutant("M1A:K8W", WILD_TYPE)
    assert parse_sequence(WILD_TYPE, WILD_TYPE) == Variant()
    for indel in ("MKTYIAK", "MKTAAYIAK"):
        variant = parse_sequence(indel, WILD_TYPE)
        assert variant == Variant(indel=indel)
        assert variant.apply(WILD_TYPE) == indel


WRONG = {
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


@pytest.mark.parametrize("text", WRONG)
def test_other_notations_are_refused(text: str) -> None:
    with pytest.raises(InputDataError) as refused:
        parse_mutant(text, WILD_TYPE)
    assert WRONG[text] in str(refused.value)


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


def test_numbers_in_messages_are_those_of_the_user() -> None:
    with pytest.raises(InputDataError, match="position 24 of the wild type is M, not A"):
        parse_mutant("A24P", WILD_TYPE, first_residue=24)
    with pytest.raises(InputDataError, match="residues 24 to 31"):
        parse_mutant("M1P", WILD_TYPE, first_residue=24)
