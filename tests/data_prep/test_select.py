"""Selection of records, and counts of the others."""

import pytest

from protlm.data.records import Record, Tally
from protlm.data_prep.encode import Selection
from protlm.system.errors import UserError


def record(length=10, **known):
    return Record("P1", "P1", "M" * length, 1, **known)


def filtered(selection: Selection, one: Record) -> tuple[bool, dict[str, int], dict[str, int]]:
    """Returns whether a record is selected, and the counts."""
    tally = Tally()
    taken = list(selection.select(iter([one]), tally)) == [one]
    return taken, dict(tally.filtered), dict(tally.noted)


TAKEN = (True, {}, {})


def test_the_default_selects_everything():
    records = iter([record()])
    assert Selection().select(records, Tally()) is records


@pytest.mark.parametrize(
    ("length", "reason"),
    [(49, "shorter than 50 residues"), (50, ""), (60, ""), (61, "longer than 60 residues")],
)
def test_bounds_of_the_length_are_included(length, reason):
    expected = (False, {reason: 1}, {}) if reason else TAKEN
    assert filtered(Selection(min_length=50, max_length=60), record(length)) == expected


def test_marked_fragments_are_omitted():
    selection = Selection(no_fragments=True)
    assert filtered(selection, record(is_fragment=True)) == (False, {"fragment": 1}, {})
    assert filtered(selection, record(is_fragment=False)) == TAKEN
    note = {"fragment status missing in the source": 1}
    assert filtered(selection, record()) == (True, {}, note)


@pytest.mark.parametrize(
    ("organisms", "known", "reason"),
    [
        (("9606",), {"taxon": 9606}, ""),
        (("9606",), {"taxon": 960}, "other organism"),
        (("9606", "562"), {"taxon": 562}, ""),
        (("homo sapiens",), {"organism": "Homo sapiens"}, ""),
        (("Homo sapiens",), {"organism": "Homo sapiens (Human)"}, ""),
        (("Escherichia coli",), {"organism": "Escherichia coli (strain K12)"}, ""),
        (("Escherichia coli",), {"organism": "Escherichia coli O6:H1 (strain CFT073)"}, ""),
        (("Escherichia coli",), {"organism": "Escherichia coli str. Sanji"}, ""),
        (("Escherichia",), {"organism": "Escherichia coli (strain K12)"}, ""),
        (("Escherichia",), {"organism": "Escherichia phage T4"}, "other organism"),
        (("Escherichia",), {"organism": "Escherichiacola"}, "other organism"),
        (("Homo",), {"organism": "Homo sapiens"}, ""),
        (("Homo sapiens", "10090"), {"organism": "Mus musculus", "taxon": 10090}, ""),
        (("9606",), {}, "organism missing in the source"),
        (("9606",), {"organism": "Homo sapiens"}, "organism missing in the source"),
        (("Mus", "9606"), {"organism": "Homo sapiens"}, "organism missing in the source"),
        (("Mus", "9606"), {"organism": "Rattus", "taxon": 10116}, "other organism"),
    ],
)
def test_an_organism_is_a_name_with_its_strains_or_a_taxon(organisms, known, reason):
    expected = (False, {reason: 1}, {}) if reason else TAKEN
    assert filtered(Selection(organisms=organisms), record(**known)) == expected


def test_an_empty_organism_is_rejected():
    """It would match every record without an organism."""
    with pytest.raises(UserError, match="--organism"):
        Selection(organisms=("9606", " "))


@pytest.mark.parametrize(
    ("bounds", "told"),
    [
        ((0, None), "--min-length 0: "),
        ((-1, 10), "--min-length -1 --max-length 10: "),
        ((11, 10), "--min-length 11 --max-length 10: "),
        ((None, 0), "--max-length 0: "),
    ],
)
def test_impossible_lengths_are_rejected(bounds, told):
    with pytest.raises(UserError, match=f"^{told}"):
        Selection(*bounds)
