"""The sorted table: every member has the cluster of its representative, at any size."""

import gzip
import pickle
import random

import numpy as np
import pytest

from protlm.data_prep import cluster_table as module
from protlm.data_prep.cluster_table import ClusterTable, name_hash
from protlm.system.errors import InputDataError


@pytest.fixture
def rows():
    """Rows of 2,000 members, some repeated; rows of one representative need not be adjacent."""
    rng = random.Random(0)
    rows = [(f"R{rng.randrange(300)}", f"P{i}") for i in range(2_000)]
    return [*rows, *rng.sample(rows, 50)]


@pytest.fixture
def write(tmp_path):
    def written(rows, name="cluster.tsv"):
        content = "".join(f"{one}\t{other}\n" for one, other in rows).encode()
        path = tmp_path / name
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return path

    return written


def assert_finds(table, rows):
    clusters, is_listed = table.clusters_of([member for _, member in rows])
    assert is_listed.all()
    assert clusters.tolist() == [name_hash(representative) for representative, _ in rows]


@pytest.mark.parametrize("name", ["cluster.tsv", "cluster.tsv.gz"])
@pytest.mark.parametrize("num_rows", [1, 7, 500, 1 << 21])
def test_members_have_the_cluster_of_their_representative(
    write, rows, tmp_path, monkeypatch, num_rows, name
):
    """Sorted in one run or in several, and looked up in one batch or in several."""
    monkeypatch.setattr(module, "_ROWS", max(num_rows, 60 if num_rows == 1 else 1))
    monkeypatch.setattr(module, "_LOOKUPS", 33)
    table = ClusterTable(write(rows, name), near=tmp_path)
    assert len(table) == 2_000
    assert_finds(table, rows)
    members = np.concatenate([members for members, _ in table.rows()])
    assert members.tolist() == sorted(name_hash(f"P{i}") for i in range(2_000))
    # Nothing is left on the disk.
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_names_are_those_of_mmseqs(write):
    table = ClusterTable(write([("sp|R|R_A", "tr|P1|P_B"), ("R", "P2")]))
    found, is_listed = table.clusters_of(["P1", "sp|P1|P_B", "tr|P2|P_C", "sp|P2|P_C"])
    assert is_listed.all()
    assert found.tolist() == [name_hash("R")] * 4


def test_a_record_missing_from_the_table_is_a_cluster_by_itself(write, rows):
    table = ClusterTable(write(rows))
    names = ["Q1", "P1", "sp|Q2|X_Y", "Q2", *(f"Q{i}" for i in range(3, 500))]
    found, is_listed = table.clusters_of(names)
    assert is_listed.tolist() == [name == "P1" for name in names]
    assert found[0] == name_hash("Q1")
    assert found[2] == found[3] == name_hash("Q2")
    assert table.clusters_of([])[0].tolist() == []


@pytest.mark.parametrize("num_rows", [5, 1 << 21])
def test_a_member_of_two_clusters_is_rejected_with_both_lines(write, rows, monkeypatch, num_rows):
    """Whether the two rows are sorted together or meet when the runs are merged."""
    monkeypatch.setattr(module, "_ROWS", num_rows)
    line, representative = next((n, r) for n, (r, m) in enumerate(rows, 1) if m == "P7")
    path = write([*rows, ("other", "P7")])
    with pytest.raises(
        InputDataError,
        match=rf"line {len(rows) + 1}: P7 is in two clusters, of other here and of "
        rf"{representative} in line {line};",
    ):
        ClusterTable(path)


@pytest.mark.parametrize("num_rows", [3, 1 << 21])
def test_names_with_equal_hashes_are_not_a_conflict(write, monkeypatch, num_rows):
    """Among 250 million names two may share a hash: then the first row counts."""
    monkeypatch.setattr(module, "_ROWS", num_rows)
    monkeypatch.setattr(module, "name_hash", lambda name: int(name[1:]) % 10 + ord(name[0]) * 100)
    rows = [("A1", "P1"), ("A1", "P2"), ("A2", "P3"), ("A3", "P12"), ("A3", "P5")]
    table = ClusterTable(write(rows))
    assert len(table) == 4
    found, _ = table.clusters_of(["P2", "P12", "P5"])
    assert found.tolist() == [6_501, 6_501, 6_503]


def test_a_stored_table_can_be_sent_to_a_job(write, rows, tmp_path, monkeypatch):
    table = ClusterTable(write(rows))
    with pytest.raises(AssertionError):
        pickle.dumps(table)
    for _ in range(2):
        # A build that is continued stores it again.
        table.store(tmp_path / "sorted")
    sent = pickle.dumps(table)
    assert len(sent) < 1_000
    monkeypatch.chdir("/")
    other = pickle.loads(sent)
    assert_finds(other, rows)
    assert (other.path, other.sha256) == (table.path, table.sha256)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.tsv", "sorted"]
