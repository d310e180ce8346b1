"""Families held out as `test_ood_family`."""

import pickle

import pytest

from protlm.data.records import Record
from protlm.data_prep.families import PAPER_FAMILIES, FamilySplit, HeldOutFamilies, entry_of
from protlm.data_prep.split import HashSplit
from protlm.system.errors import InputDataError, UserError

ALL_TRAIN = HashSplit(valid_fraction=0, test_fraction=0)
EXPORT = "Entry\tPfam\nP00001\tPF00069;PF07714;\nP00002\t\nP00003\tPF07714;\nP00004\tPF00001;\n"


def record(identifier):
    return Record(identifier, identifier, "MKV", 1)


def held_out(rule, identifiers):
    return {name for name in identifiers if rule.split_of(record(name), bytes(16)) != "train"}


@pytest.mark.parametrize(
    "text",
    [
        EXPORT,
        EXPORT.replace("\n", "\r\n"),
        "Entry Name\tPfam\tEntry\nX_Y\tPF07714;\tP00001\nX_Z\tPF07714.3\tP00003\n",
        "P00001\tPF00069\nP00002\t\nP00001\tPF07714\n\nP00003\tPF07714\n",
        "accession\tpfam\nP00001\tPF07714\nP00003\tPF07714\n",
        "pfamseq_acc\tseq_version\tpfamA_acc\nP00001\t1\tPF07714\nP00003\t2\tPF07714\n",
    ],
)
@pytest.mark.parametrize("name", ["families.tsv", "families.tsv.gz"])
def test_every_form_of_the_table_is_equivalent(table, text, name):
    rule = FamilySplit(HeldOutFamilies(table(text, name), ["PF07714"]), ALL_TRAIN)
    identifiers = [f"P0000{i}" for i in range(9)]
    assert held_out(rule, identifiers) == {"P00001", "P00003"}
    assert rule.split_of(record("P00001"), bytes(16)) == "test_ood_family"


def test_isoforms_versions_and_clusters_named_by_an_entry_follow_it(table):
    rule = FamilySplit(HeldOutFamilies(table(EXPORT), ["PF00069"]), ALL_TRAIN)
    followers = {"P00001-2", "P00001.7", "UniRef50_P00001", "P00001"}
    others = {"P000012", "XP00001", "P00001-x", "P00001-2-3", "P00003-2", "UniRef50_P00003"}
    assert held_out(rule, followers | others) == followers
    assert entry_of("A0A017PJG5-12") == "A0A017PJG5"
    assert entry_of("gene-2") == "gene-2"


def test_the_default_families_are_the_papers(table):
    text = "".join(f"Q{i:05d}\t{family}\n" for i, family in enumerate(PAPER_FAMILIES))
    families = HeldOutFamilies(table(text + "Q99999\tPF00001\n"))
    assert len(PAPER_FAMILIES) == len(set(PAPER_FAMILIES)) == 20
    assert [families.families_of(f"Q{i:05d}") for i in range(20)] == [(f,) for f in PAPER_FAMILIES]
    assert families.families_of("Q99999") == ()
    assert families.absent == ()


def test_a_family_is_held_out_as_a_whole_and_nothing_else(table):
    """Compared with a scan of all lines: no entry of a held-out family is in another split."""
    rows = {f"Q{i:05d}": [f"PF{i * 7 % 30:05d}", f"PF{i % 11:05d}"] for i in range(3_000)}
    lines = [f"{entry}\t{';'.join(families)};" for entry, families in rows.items()]
    wanted = {"PF00003", "PF00028"}
    rule = FamilySplit(HeldOutFamilies(table("\n".join(lines)), sorted(wanted)), ALL_TRAIN)
    expected = {entry for entry, families in rows.items() if wanted & set(families)}
    assert 100 < len(expected) < 1_000
    assert held_out(rule, rows) == expected


def test_only_entries_of_the_wanted_families_are_kept(table):
    text = "".join(f"P{i:05d}\tPF00001\n" for i in range(20_000)) + "Q00001\tPF00002\n"
    families = HeldOutFamilies(table(text), ["PF00002"])
    assert len(pickle.dumps(families)) < 1_000


def test_other_records_follow_the_other_rule(table):
    rule = FamilySplit(HeldOutFamilies(table(EXPORT), ["PF00001"]), HashSplit(0.5, 0))
    assert rule.split_of(record("P00001"), bytes(16)) == "valid"
    assert rule.split_of(record("P00001"), b"\xff" * 16) == "train"
    assert rule.split_of(record("P00004"), b"\xff" * 16) == "test_ood_family"


@pytest.mark.parametrize("text", [EXPORT, "P00001\tPF07714\nP00001\tPF00069\nP00001\tPF07714\n"])
def test_every_family_of_a_held_out_record_is_noted(table, text):
    families = HeldOutFamilies(table(text), ["PF00069", "PF07714", "PF99999"])
    rule = FamilySplit(families, ALL_TRAIN)
    noted = list(rule.notes_of(record("P00001"), "test_ood_family"))
    assert noted == ["of the held-out family PF00069", "of the held-out family PF07714"]
    assert list(rule.notes_of(record("P00002"), "train")) == []
    described = rule.describe()
    assert described["families"] == ["PF00069", "PF07714", "PF99999"]
    assert described["absent_from_table"] == ["PF99999"]
    assert described["otherwise"] == ALL_TRAIN.describe()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1"),
        ("Entry,Pfam\nP00001,PF00069\n", "line 1"),
        ("Entry\tName\nP00001\tx\n", "line 1"),
        ("Entry\tPfam\nP00001\n", "line 2: 1 fields, not 2, in 'P00001';"),
        ("Entry\tPfam\nP00001\tPF00069;\tx\n", "line 2: 3 fields, not 2, in 'P00001.t"),
        ("Entry\tPfam\nP00001\tPF00069,PF00001\n", "line 2: 'P00001' with 'PF00069,PF00001'"),
        ("Entry\tPfam\nP00001\tIPR00069;\n", "line 2"),
        ("Entry\tPfam\nP00001\tPF00069;\n\tPF00069;\n", "line 3"),
        ("P00001\tPF00069\nP00002\tPF0069\n", "line 2"),
    ],
)
def test_an_invalid_table_is_an_error_with_its_line(table, text, message):
    with pytest.raises(InputDataError, match=rf"table\.tsv, {message}"):
        HeldOutFamilies(table(text), ["PF00069"])


def test_a_table_of_other_families_is_an_error(table):
    with pytest.raises(InputDataError, match=r"no entry of PF99998, PF99999"):
        HeldOutFamilies(table(EXPORT), ["PF99999", "PF99998"])


def test_invalid_families_are_rejected(table):
    with pytest.raises(UserError, match=r"--ood-families kinase .* PF00069"):
        HeldOutFamilies(table(EXPORT), ["kinase"])
