"""Tables of labels: columns by name, a byte order mark, blank lines, and refused ones."""

import gzip
import sys
from pathlib import Path

import pytest

from protlm.data.tables import number_of, read_labels, read_table, read_text, write_rows
from protlm.system.errors import InputDataError


@pytest.mark.parametrize(
    "content",
    [
        "accession\tlength\tcluster30\nA\t3\tf0\nB\t4\t\n",
        "\ufeffaccession\tlength\tcluster30\r\nA\t3\tf0\r\nB\t4\t\r\n",
        "\naccession\tlength\tcluster30\nA\t3\tf0\n\nB\t4\t\n\n",
        "accession,length,cluster30\nA,3,f0\nB,4,\n",
        '"accession";"length";" cluster30 "\r\n"A";3;f0 \r\nB;4;\r\n;;\r\n',
        "# urn:x, y\r\n#\r\n##z\n\n#w\naccession,length,cluster30\nA,3,f0\nB,4,\n",
        "#x\taccession\tcluster30\n#\tA\tf0\n\tB\t\n",
        "#from Smith, 2020\n# accession, cluster30\naccession,length,cluster30\nA,3,f0\nB,4,\n",
        '"# a, b",,\n#,,\n# accession,length,cluster30\nA,3,f0\nB,4,\n',
    ],
    ids=[
        "plain",
        "mark",
        "blank lines",
        "commas",
        "semicolons",
        "comments",
        "name with #",
        "two commas",
        "header with #",
    ],
)
@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_labels_are_read_by_the_names_of_columns(
    content: str, compress: type[bytes], tmp_path: Path
) -> None:
    (tmp_path / "t.tsv").write_bytes(compress(content.encode()))
    assert read_labels(tmp_path / "t.tsv", "accession", "cluster30") == {"A": "f0", "B": ""}


@pytest.mark.parametrize(
    "content, words",
    [
        ("accession\tfamily\nA\tB\n", "no column cluster30, only"),
        ("accession\tcluster30\nA\n", "line 2: 1 fields"),
        ("accession\tcluster30\nA\tf0\n\nA\tf1\n", "line 4: A is repeated; leave one row"),
        ("", "t.tsv: the file is empty"),
        ("# a\n\n#b", "the file is empty, or has comments alone; give a table of labels"),
        (
            f'accession\tcluster30\nA\t"{"f" * 131_073}\n',
            "line 2: a cell has over 131,072 char.*; close a quot",
        ),
        ('{"accession": "A"}', "this is JSON, not a table of labels"),
        ("# a\n#b\n\naccession\tcluster30\nA\tf0\nA\tf1\n", "line 6: A is repeated"),
        ("accession\tcluster30\nA\0\tf0\n", "this is a binary file, not a table of labels"),
        ("accession\tcluster30\n\xff\n", r"line 2: it cannot be read as .*iconv -f CP1252"),
        ("\x00\x93\xff junk", r"tsv: this is a binary file, not a table of labels$"),
        ("\x89HDF\r\n\x1a\n\0", r"tsv: this is HDF5, not a table of labels"),
        ("BZh91AY&SY\0\x93", "this is compressed by bzip2; type: bunzip2"),
        ("\xff\xfea\0c\0", "the text is UTF-16; type: iconv -f UTF-16 -t UTF-8"),
    ],
)
def test_a_bad_table_of_labels_is_named(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_bytes(content.encode("latin-1"))
    with pytest.raises(InputDataError, match=words):
        read_labels(tmp_path / "t.tsv", "accession", "cluster30")


def test_accessions_are_also_those_of_uniprot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.tsv").write_text("Gene Names\tEntry\tcluster30\nx\tA\tf0\n")
    assert read_labels(tmp_path / "t.tsv", "accession", "cluster30") == {"A": "f0"}
    assert "t.tsv: accessions from the column Entry" in capsys.readouterr().err


def test_headers_of_scope_are_labels(tmp_path: Path) -> None:
    text = ">d1dlwa_ a.1.1.1 (A:) Hemoglobin {X}\nslfek\n>d1uvya_ a.1.12.3 (A:) {Y}\nslfek\n"
    (tmp_path / "scope.fa").write_text(text)
    for column, labels in (("class", ["a", "a"]), ("superfamily", ["a.1.1", "a.1.12"])):
        found = read_labels(tmp_path / "scope.fa", "accession", column)
        assert found == dict(zip(["d1dlwa_", "d1uvya_"], labels, strict=True))
    with pytest.raises(InputDataError, match="cluster30 is not one of SCOPe's class, fold, super"):
        read_labels(tmp_path / "scope.fa", "accession", "cluster30")


@pytest.mark.parametrize("name", ["x.lmdb", "data.mdb"])
def test_pickles_in_lmdb_are_refused_with_lines_that_write_a_table(tmp_path, name: str) -> None:
    (tmp_path / name).write_bytes(bytes(16) + (0xBEEFC0DE).to_bytes(4, "little") + bytes(99))
    path = tmp_path if name == "data.mdb" else tmp_path / name
    with pytest.raises(InputDataError, match="LMDB, whose values are pickles") as error:
        read_table(path, "a table of labels")
    lines = "\n".join(str(error.value).splitlines()[1:])
    assert f"subdir={name == 'data.mdb'}" in lines and "num_examples" in lines
    compile(lines, "lines", "exec")


@pytest.mark.parametrize("text", ["-1.5e3", "+5", ".5", "007", "1e-300"])
def test_numbers_are_ascii_digits_with_a_point(text: str) -> None:
    assert number_of(text) == float(text)


def test_what_only_python_or_people_read_is_not_a_number() -> None:
    others = ("inf", "nan", "1e400", "1_000", "\u0663", "0,5", "12%", ">1", "0x1", "1e", "--1", "")
    assert [number_of(text) for text in others] == [None] * len(others)


def test_formulas_are_written_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    formulas = ["=1+1", "@SUM(A1)", "+A1", "-cmd|x", "\tx", "\uff1d1"]
    others = ["-0.5", "+5", "-1e-3", "-inf", "-", "+", "=", "", "P1", "'=1", "-1,5", "M1A"]
    write_rows(sys.stdout, "|", [[*formulas, *others]])
    written = capsys.readouterr().out
    assert written.startswith("'=1+1|'@SUM(A1)|'+A1|\"'-cmd|x\"|'\tx|'\uff1d1|")
    assert written.endswith("|" + "|".join(others) + "\n")


def test_tables_that_expand_too_much_are_refused(tmp_path: Path) -> None:
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"a" * (1 << 20)) * 80)
    with pytest.raises(InputDataError, match="expands to over 64 MiB, too much for a table"):
        read_text(tmp_path / "b.gz", "a table")
    (tmp_path / "w.tsv").write_text("".join(f"c{number % 99_999}\t" for number in range(100_000)))
    with pytest.raises(InputDataError, match="several columns of the name c0;"):
        read_table(tmp_path / "w.tsv", "a table")
