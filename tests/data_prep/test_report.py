"""The list of rejected records: a valid table for any names."""

from protlm.data_prep.report import read_rejected, write_rejected


def test_names_of_any_kind_are_read_back(tmp_path):
    """File names are arbitrary, and an accession of a flat file may contain a line separator."""
    listed = {"digit": [("a\tb\x1cc", "x\ny\u2028.fasta", 3), ("\x1d", "\udcff", 4)], "gap": []}
    write_rejected(tmp_path, listed)
    assert read_rejected(tmp_path) == {"digit": [("a b c", "x y .fasta", 3), ("", "\\udcff", 4)]}
