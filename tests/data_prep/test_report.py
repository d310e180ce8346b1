"""The list of rejected records: a valid table for any names."""

from protlm.data_prep.prepare import prepare
from protlm.data_prep.report import read_rejected, write_rejected
from protlm.data_prep.split import HashSplit


def test_names_of_any_kind_are_read_back(tmp_path):
    """File names are arbitrary, and an accession of a flat file may contain a line separator."""
    listed = {"digit": [("a\tb\x1cc", "x\ny\u2028.fasta", 3), ("\x1d", "\udcff", 4)], "gap": []}
    write_rejected(tmp_path, listed)
    assert read_rejected(tmp_path) == {"digit": [("a b c", "x y .fasta", 3), ("", "\\udcff", 4)]}


def test_an_empty_split_is_reported(tmp_path, capsys):
    source = tmp_path / "a.fasta"
    source.write_text(">a\nMKVLWAALLV\n>b\nMKTAYIAKQR\n")
    prepare([source], tmp_path / "data", split_rule=HashSplit(0.001, 0))
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert told == (
        "protlm: warning: split valid is empty: 2 sequences at --valid-fraction 0.001; to have "
        "one, prepare them again with a larger --valid-fraction"
    )
