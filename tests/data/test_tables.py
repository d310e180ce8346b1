"""Tables of labels: columns by name, a byte order mark, blank lines, and refused ones."""

import gzip
from pathlib import Path

import pytest

from protlm.data.tables import read_labels
from protlm.errors import InputDataError


@pytest.mark.parametrize(
    "content",
    [
        "accession\tlength\tcluster30\nA\t3\tf0\nB\t4\t\n",
        "\ufeffaccession\tlength\tcluster30\r\nA\t3\tf0\r\nB\t4\t\r\n",
        "\naccession\tlength\tcluster30\nA\t3\tf0\n\nB\t4\t\n\n",
        "accession,length,cluster30\nA,3,f0\nB,4,\n",
    ],
    ids=["plain", "byte order mark", "blank lines", "commas"],
)
@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_labels_are_read_by_the_names_of_columns(
    content: str, compress: type[bytes], tmp_path: Path
) -> None:
    (tmp_path / "t.tsv").write_bytes(compress(content.encode()))
    found = read_labels(tmp_path / "t.tsv", "accession", "cluster30")
    assert found == {"A": "f0", "B": ""}


@pytest.mark.parametrize(
    "content, words",
    [
        ("accession\tfamily\nA\tB\n", "not cluster30"),
        ("accession\tcluster30\nA\n", "line 2: 1 fields"),
        ("accession\tcluster30\nA\tf0\n\nA\tf1\n", "line 4: A is repeated; leave one row"),
        ("", "not accession"),
        ("accession\tcluster30\n\xff\n", "cannot be read"),
    ],
)
def test_a_bad_table_of_labels_is_named(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_bytes(content.encode("latin-1"))
    with pytest.raises(InputDataError, match=words):
        read_labels(tmp_path / "t.tsv", "accession", "cluster30")
