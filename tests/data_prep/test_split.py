"""Splits by table and by hash."""

import hashlib
import random

import pytest

from protlm.data.records import Record
from protlm.data_prep.split import HashSplit, TableSplit
from protlm.system.errors import InputDataError, UserError


def record(identifier="P1", sequence="MKV"):
    return Record(identifier, identifier, sequence, 1)


def digest(sequence="MKV"):
    return hashlib.blake2b(sequence.encode(), digest_size=16).digest()


def split_of(rule, one):
    return rule.split_of(one, digest(one.sequence))


def test_fractions_are_met():
    rule = HashSplit(valid_fraction=0.1, test_fraction=0.2)
    names = [split_of(rule, record(sequence="MKVL" * i)) for i in range(2_000)]
    for name, share in (("train", 0.7), ("valid", 0.1), ("test", 0.2)):
        assert abs(names.count(name) - share * 2_000) < 5 * (2_000 * share * (1 - share)) ** 0.5


def test_the_hash_is_a_number_between_0_and_1():
    """The first eight bytes of the hash, big-endian, as a fraction; the others do not count."""
    rule = HashSplit(valid_fraction=0.25, test_fraction=0.5)
    places = {0x00: "valid", 0x3F: "valid", 0x40: "test", 0xBF: "test", 0xC0: "train"}
    for first, split in places.items():
        for last in (b"\x00", b"\xfe"):
            assert rule.split_of(record(), bytes([first]) + last * 15) == split


@pytest.mark.parametrize("fraction", [0, 2**-60, 0.01, 0.1, 1 / 3, 0.5, 0.999, 1 - 2**-53])
def test_split_borders_agree_with_rounded_numbers(fraction):
    """As floating-point numbers, some thousand hashes may be rounded to one value."""
    rules = {"valid": HashSplit(fraction, 0), "test": HashSplit(0, fraction)}
    middle = int(fraction * 2**64)
    for place in {0, 1, 2**64 - 1, *range(middle - 3_000, middle + 3_000, 7)}:
        if 0 <= place < 2**64:
            for name, rule in rules.items():
                expected = name if place / 2**64 < fraction else "train"
                for rest in (b"", b"\0" * 8, b"\xff" * 8):
                    assert rule.side_of(place.to_bytes(8, "big") + rest) == expected


def test_a_sequence_keeps_its_split_in_any_context():
    rule, rng = HashSplit(valid_fraction=0.2, test_fraction=0.2), random.Random(0)
    sequences = ["".join(rng.choices("ACDEFGHIKLMNPQRSTVWY", k=50)) for _ in range(300)]
    first = {one: split_of(rule, record(str(i), one)) for i, one in enumerate(sequences)}
    rng.shuffle(sequences)
    appended = ["M" + one for one in sequences] + sequences
    later = HashSplit(valid_fraction=0.2, test_fraction=0.2)
    again = {one: split_of(later, record(f"new{i}", one)) for i, one in enumerate(appended)}
    assert first == {one: again[one] for one in first}
    assert set(first.values()) == {"train", "valid", "test"}


@pytest.mark.parametrize("fractions", [(-0.1, 0), (0, 1), (0.5, 0.5), (float("nan"), 0)])
def test_invalid_fractions_are_rejected(fractions):
    with pytest.raises(UserError, match="valid_fraction"):
        HashSplit(*fractions)


@pytest.mark.parametrize("name", ["splits.tsv", "splits.tsv.gz"])
def test_a_table_is_looked_up_by_its_named_columns(table, name):
    """It may repeat itself."""
    rule = TableSplit(
        table("length\tsplit\taccession\n3\ttest_iid\tP1\n\n4\ttrain\tP2\r\n4\ttrain\tP2\n", name)
    )
    assert split_of(rule, record("P1")) == "test_iid"
    assert split_of(rule, record("P2")) == "train"
    assert split_of(rule, record("P3")) is None
    assert rule.describe()["table"] == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: the table is empty; give a split table"),
        ("accession,split\nP1,train\n", "line 1"),
        ("P1\ttrain\n", "line 1"),
        ("accession\tsplit\nP1\n", r"line 2: 1 fields, not 2, in 'P1'$"),
        ("accession\tsplit\nP1\ttrain\tx\n", r"line 2: 3 fields, not 2, in 'P1\\ttrain\\tx'$"),
        (f"accession\tsplit\n{'W' * 999}\n", r"line 2: 1 fields, not 2, in 'W{79}$"),
        ("accession\tsplit\nP1\t../../x\n", "line 2.*small letters"),
        ("accession\tsplit\nP1\tTrain\n", "line 2"),
        ("accession\tsplit\nP1\t\n", "line 2"),
        ("accession\tsplit\nP1\ttrain\nP1\ttest\n", "line 3: P1 is in train and in test"),
    ],
)
def test_an_invalid_table_is_an_error_with_its_line(table, text, message):
    with pytest.raises(InputDataError, match=rf"table\.tsv, {message}"):
        TableSplit(table(text))


def test_a_missing_or_truncated_table_is_an_error(tmp_path, table):
    with pytest.raises(InputDataError, match="split table"):
        TableSplit(tmp_path / "none.tsv")
    path = table("accession\tsplit\nP1\ttrain\n", "splits.tsv.gz")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputDataError, match="truncated"):
        TableSplit(path)
