"""Relatives of many queries: folders, tables of clusters and of hits, and one file."""

import gzip
from pathlib import Path

import pytest

from protlm.data.families import Relatives, draw
from protlm.options.relatives import FamilyOptions
from protlm.system.errors import InputDataError
from tests.data.families.conftest import QUERY, fasta

ROW, OTHER = "MKTAYLAKQRQLSFVKSHFS", "MKTAYLAKQRQLSFVKSWWW"
SECOND = "ACDEFGHIKLMNPQRSTVWY"
PROTEINS = f">q\n{QUERY}\n>sp|P1|A_X\n{ROW}\n>b\n{OTHER}\n>s\n{SECOND}\n>c\nWWWWWWWWWWWW\n"
CLUSTERS = "q\tq\nq\tP1\nq\tb\ns\ts\ns\tc\ns\tmissing\n"
M8 = (
    "# BLASTP 2.16.0+\nq\tP1\t{0}\t20\t2\t0\t1\t20\t1\t20\t1e-9\t50\nq\tq\t{1}\t20\n"
    "q\tP1\t{2}\t9\t0\t0\t1\t9\t1\t9\t1e-2\t20\nq\tb\t{2}\t20\ns\tc\t{0}\t9\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "families"
    folder.mkdir()
    (folder / "q.a3m").write_text(fasta(QUERY, ROW))
    (folder / "s.2.fasta.gz").write_bytes(gzip.compress(fasta(OTHER, names="b").encode()))
    (folder / "P1.STO").write_text(f"# STOCKHOLM 1.0\nx {ROW}\ny {OTHER}\n//\n")
    (folder / "log.txt").write_text("")
    return folder


@pytest.fixture
def table(tmp_path: Path):
    """Returns the relatives of a table, and of sequences beside it."""
    (tmp_path / "proteins.fasta.gz").write_bytes(gzip.compress(PROTEINS.encode()))

    def relatives(text: str, **options: object) -> Relatives:
        (tmp_path / "table.tsv").write_text(text)
        whole = tmp_path / "proteins.fasta.gz"
        return Relatives(tmp_path / "table.tsv", FamilyOptions(whole_relatives=whole, **options))

    return relatives


def test_a_folder_has_a_file_for_each_query(folder: Path, capsys) -> None:
    relatives = Relatives(folder)
    relatives.check(["q", "s.2", "sp|P1|A_X"])
    for name, query, own in (("q", QUERY, "a"), ("s.2", SECOND, "b"), ("sp|P1|A_X", ROW, "y")):
        assert [one.name for one in relatives.of(name, query).relatives] == [own]
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "a file for 3 of 3 queries; files of families: 3, other files: 1" in said


def test_queries_without_a_file_are_counted_and_refused_unless_allowed(folder, capsys) -> None:
    with pytest.raises(
        InputDataError,
        match=r"no file NAME\.a3m, .*\.sto.* for 2 of 3 queries, .* x .names there are like P1.;",
    ) as error:
        Relatives(folder).check(["q", "x", "../q"])
    assert error.value.options == {"allow_none": True}
    with pytest.raises(InputDataError, match="for 1 of 1 queries"):
        Relatives(folder).of("x", SECOND)
    relatives = Relatives(folder, FamilyOptions(allow_none=True))
    with pytest.raises(InputDataError, match=r"2 of 2 queries, .* name each file as its query"):
        relatives.check(["y", "x"], of_all=True)
    relatives.check(["q", "x"], of_all=True)
    said = capsys.readouterr().err
    assert "a file for 1 of 2 queries, the others are read alone; files of families: 3" in said
    family = relatives.of("x", SECOND)
    assert (family.name, family.query, family.relatives) == ("x", SECOND, ())
    (folder / "empty").mkdir()
    with pytest.raises(
        InputDataError, match=r"empty has no file NAME\.a3m, .*; write the relatives of"
    ):
        Relatives(folder / "empty")
    (folder / "q.fasta").write_text(">a\nMKV\n")
    with pytest.raises(InputDataError, match=r"has q\.a3m and q\.fasta; leave one file for each"):
        Relatives(folder)


def test_one_file_has_the_relatives_of_one_query(folder: Path, capsys) -> None:
    relatives = Relatives(folder / "q.a3m")
    with pytest.raises(InputDataError, match="of one query, not of 2; give a folder with a file"):
        relatives.check(["q", "s"])
    relatives.check(["q", "q"])
    family = relatives.of("q", QUERY)
    said = capsys.readouterr().err
    assert said == f"{family}\n" and "q.a3m: an alignment of 2 rows, the first the query" in said
    assert [one.name for one in Relatives([("a", ROW)]).of("q", QUERY).relatives] == ["a"]
    assert "the list: unaligned sequences (1)" in capsys.readouterr().err
    for source in (folder / "none.a3m", folder / "none"):
        with pytest.raises(InputDataError, match="no such file; give the path of a file, a fol"):
            Relatives(source)


def test_a_table_of_clusters_has_the_relatives_of_its_members(table, capsys) -> None:
    relatives = table(CLUSTERS)
    relatives.check(["q", "sp|P1|A_X", "c"])
    said = capsys.readouterr().err
    assert "table.tsv: a row for 3 of 3 queries; 6 rows of clusters, 2 queries; 4 of 5 mem" in said
    # The representative is a relative of a member, and no protein of itself.
    assert {one.name for one in relatives.of("q", QUERY).relatives} == {"P1", "b"}
    assert {one.name for one in relatives.of("sp|P1|A_X", ROW).relatives} == {"q", "b"}
    family = relatives.of("c", "WWWWWWWWWWWW")
    assert [(one.name, one.residues) for one in family.relatives] == [("s", SECOND)]
    assert family.counts == {"without a sequence in the file": 1} and family.is_uniform
    # Without a check before, one query is read for itself.
    assert {one.name for one in table(CLUSTERS).of("q", QUERY).relatives} == {"P1", "b"}
    # A row that is there twice is one.
    assert {one.name for one in table(CLUSTERS * 2).of("sp|P1|A_X", ROW).relatives} == {"q", "b"}


@pytest.mark.parametrize("identities", [("90.0", "100", "85.5"), ("0.900", "1.000", "0.855")])
def test_a_table_of_hits_has_identities(table, identities: tuple[str, ...], capsys) -> None:
    family = table(M8.format(*identities)).of("q", QUERY)
    # Of two hits of one pair, the higher; the query is left out.
    found = {one.name: one.identity for one in family.relatives}
    assert found == pytest.approx({"P1": 0.9, "b": 0.855})
    kind = "percent" if "." not in identities[1] else "fractions"
    assert f"5 rows of hits, identities as {kind}, 2 queries" in capsys.readouterr().err
    assert {*draw(family, number=1, tokens=99, seed=0).names} == {"P1", "b"}
    assert draw(family, number=2, tokens=99, seed=0).names == []
    family = table(M8.format(*identities), max_identity=0.88).of("q", QUERY)
    assert family.counts == {"above 88% identity": 1}


TABLES = {
    "no query": (CLUSTERS, "x", "tsv has no row of another protein for 1 of 1 queries, .* them x "),
    "a hit alone": (M8.format("90", "100", "85"), "b", "no row of another protein for 1 of 1"),
    "a cluster of one": ("a\ta\nq\tq\nq\tb\n", "a", "no row of another protein for 1 of 1"),
    "no name": (CLUSTERS, "", "them .without a name. .names there are like q.; name a file$"),
    "two clusters": ("q\tc\ns\tc\n", "c", "c is a member of q and of s, and not in the first col"),
    "one word": ("q\tq\nq\n", "q", r"line 2: 'q' is not a table of query and member"),
    "no identity": (
        "q\tb\t0.9\nq\tc\tx\n",
        "q",
        r"line 2: 'q\\tc\\tx' is not a table of .*identity",
    ),
    "mixed": ("q\tb\nq\tc\t0.9\n", "q", r"line 2: 'q\\tc\\t0.9' is not a table"),
    "members without sequences": (
        "q\tx\nq\ty\n",
        "q",
        "has none of the 2 members of",
    ),
}


@pytest.mark.parametrize(("text", "query", "said"), TABLES.values(), ids=TABLES)
def test_tables_without_relatives_are_refused(table, text: str, query: str, said: str) -> None:
    with pytest.raises(InputDataError, match=said):
        table(text).of(query, SECOND)


def test_a_table_may_have_a_header_and_needs_sequences(table, tmp_path: Path) -> None:
    assert table("query\ttarget\tfident\nq\tb\t0.5\n").of("q", QUERY).relatives[0].identity == 0.5
    with pytest.raises(InputDataError, match="without sequences; give the sequence file") as error:
        Relatives(tmp_path / "table.tsv")
    assert error.value.options == {"whole_relatives": "FASTA"}
    with pytest.raises(InputDataError, match="draw them uniformly") as error:
        table(CLUSTERS, weights="neighbors").of("q", QUERY)
    assert error.value.options == {"weights": "uniform"}


def test_one_draw_is_that_of_a_batch(table) -> None:
    """Whatever else is in a table, and was asked for before."""
    more = table(CLUSTERS + "t\tt\nt\tu\n")
    more.check(["c", "P1", "q"])
    for name in ("P1", "q"):
        families = more.of(name, QUERY), table(CLUSTERS).of(name, QUERY)
        one, other = [draw(family, number=0, tokens=99, seed=0) for family in families]
        assert one.digest == other.digest
