"""Splits by table and by hash."""

import gzip

import pytest

from data_prep.split import HashSplit, TableSplit
from protlm.data.records import Record
from protlm.errors import InputDataError, UserError


def record(identifier="P1", sequence="MKV"):
    return Record(identifier, identifier, sequence, 1)


@pytest.fixture
def table(tmp_path):
    def write(text: str, name="splits.tsv"):
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
        return TableSplit(path)

    return write


def test_fractions_are_met():
    split = HashSplit(valid_fraction=0.1, test_fraction=0.2)
    names = [split.split_of(record(sequence="MKVL" * i)) for i in range(2_000)]
    for name, share in (("train", 0.7), ("valid", 0.1), ("test", 0.2)):
        assert abs(names.count(name) - share * 2_000) < 5 * (2_000 * share * (1 - share)) ** 0.5


def test_equal_sequences_fall_on_one_side_whatever_they_are_called():
    split = HashSplit(valid_fraction=0.3, test_fraction=0.3)
    for i in range(50):
        assert len({split.split_of(record(name, "MKVL" * i)) for name in "abc"}) == 1


def test_a_larger_fraction_keeps_what_was_in_it():
    small, large = HashSplit(0.1, 0), HashSplit(0.2, 0)
    for i in range(200):
        one = record(sequence="MKVL" * i)
        assert small.split_of(one) == "train" or large.split_of(one) == "valid"


@pytest.mark.parametrize("fractions", [(-0.1, 0), (0, 1), (0.5, 0.5), (float("nan"), 0)])
def test_impossible_fractions_are_refused(fractions):
    with pytest.raises(UserError, match="valid_fraction"):
        HashSplit(*fractions)


@pytest.mark.parametrize("name", ["splits.tsv", "splits.tsv.gz"])
def test_a_table_is_looked_up_by_its_named_columns(table, name):
    split = table("length\tsplit\taccession\n3\ttest_iid\tP1\n\n4\ttrain\tP2\r\n", name)
    assert split.split_of(record("P1")) == "test_iid"
    assert split.split_of(record("P2")) == "train"
    assert split.split_of(record("P3")) is None
    assert split.describe()["table"] == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1"),
        ("accession,split\nP1,train\n", "line 1"),
        ("P1\ttrain\n", "line 1"),
        ("accession\tsplit\nP1\n", "line 2: 1 fields"),
        ("accession\tsplit\nP1\ttrain\textra\n", "line 2: 3 fields"),
        ("accession\tsplit\nP1\t../../x\n", "line 2.*small letters"),
        ("accession\tsplit\nP1\tTrain\n", "line 2"),
        ("accession\tsplit\nP1\t\n", "line 2"),
        ("accession\tsplit\nP1\ttrain\nP1\ttest\n", "line 3: P1 is in train and in test"),
    ],
)
def test_a_table_that_is_none_is_an_error_with_its_line(table, text, message):
    with pytest.raises(InputDataError, match=rf"splits\.tsv, {message}"):
        table(text).split_of(record())


def test_a_table_may_repeat_itself(table):
    assert table("accession\tsplit\nP1\ttrain\nP1\ttrain\n").split_of(record()) == "train"


def test_a_missing_or_truncated_table_is_an_error(tmp_path, table):
    with pytest.raises(InputDataError, match="split table"):
        TableSplit(tmp_path / "none.tsv").split_of(record())
    whole = table("accession\tsplit\nP1\ttrain\n", "splits.tsv.gz")
    whole.path.write_bytes(whole.path.read_bytes()[:-9])
    with pytest.raises(InputDataError, match="truncated"):
        whole.split_of(record())
