"""Clusters of a table: each member has one, and whole clusters go to one split."""

import pickle
import random

import pytest

from protlm.data.records import Record
from protlm.data_prep import clusters as module
from protlm.data_prep.clusters import PULLED, UNCLUSTERED, ClusterSplit, ClusterTable, name_hash
from protlm.data_prep.families import FamilySplit, HeldOutFamilies
from protlm.data_prep.split import HashSplit
from protlm.system.errors import InputDataError

TENTHS = HashSplit(valid_fraction=0.1, test_fraction=0.1)


@pytest.fixture
def rows():
    """Rows of 2,000 members, some repeated; rows of one representative need not be adjacent."""
    rng = random.Random(0)
    rows = [(f"R{rng.randrange(300)}", f"P{i}") for i in range(2_000)]
    return [*rows, *rng.sample(rows, 50)]


def assert_finds(found, rows):
    clusters, is_listed = found.clusters_of([member for _, member in rows])
    assert is_listed.all()
    assert clusters.tolist() == [name_hash(representative) for representative, _ in rows]


@pytest.mark.parametrize("name", ["cluster.tsv", "cluster.tsv.gz"])
def test_members_have_the_cluster_of_their_representative(table, rows, name):
    found = ClusterTable(table(rows, name))
    assert len(found) == 2_000
    assert_finds(found, rows)
    for representative, member in rows:
        assert found.cluster_of(name_hash(member)) == name_hash(representative)
    assert {found.cluster_of(one) for one in (0, name_hash("Q1"), 2**64 - 1)} == {None}


def test_names_are_those_of_mmseqs(table):
    """MMseqs2 writes P12345 for sp|P12345|AATM_RABIT; a table may contain either."""
    full = ClusterTable(table([("sp|R|R_A", "tr|P1|P_B"), ("R", "P2")]))
    names = ["P1", "sp|P1|P_B", "tr|P2|P_C", "sp|P2|P_C"]
    assert_finds(full, [("R", name) for name in names])
    rule = ClusterSplit(full, HashSplit(0.5, 0))
    assert {split_of(rule, name) for name in names} == {split_of(rule, "R")}


def test_a_record_missing_from_the_table_is_a_cluster_by_itself(table, rows):
    names = ["Q1", "P1", "sp|Q2|X_Y", "Q2", *(f"Q{i}" for i in range(3, 500))]
    read = ClusterTable(table(rows))
    found, is_listed = read.clusters_of(names)
    assert is_listed.tolist() == [name == "P1" for name in names]
    assert found[0] == name_hash("Q1")
    assert found[2] == found[3] == name_hash("Q2")
    assert read.clusters_of([])[0].tolist() == []


def test_a_member_of_two_clusters_is_rejected_with_both_lines(table, rows):
    """Two records of one name, in clusters that may be in different splits, would leak."""
    line, representative = next((n, r) for n, (r, m) in enumerate(rows, 1) if m == "P7")
    with pytest.raises(
        InputDataError,
        match=rf"two\.tsv, line {len(rows) + 1}: P7 is in two clusters, of other here and of "
        rf"{representative} in line {line};",
    ):
        ClusterTable(table([*rows, ("other", "sp|P7|A_B")], "two.tsv"))


def test_names_with_equal_hashes_are_not_a_conflict(table, monkeypatch):
    """Among 250 million names two may share a hash: then the first row counts."""
    monkeypatch.setattr(module, "name_hash", lambda name: int(name[1:]) % 10 + ord(name[0]) * 100)
    rows = [("A1", "P1"), ("A1", "P2"), ("A2", "P3"), ("A3", "P12"), ("A3", "P5")]
    read = ClusterTable(table(rows))
    assert len(read) == 4
    found, _ = read.clusters_of(["P2", "P12", "P5"])
    assert found.tolist() == [6_501, 6_501, 6_503]


def test_a_stored_table_can_be_sent_to_a_job(table, rows, tmp_path, monkeypatch):
    read = ClusterTable(table(rows))
    with pytest.raises(AssertionError):
        pickle.dumps(read)
    for _ in range(2):
        # A build that is continued stores it again.
        read.store(tmp_path / "sorted")
    sent = pickle.dumps(read)
    assert len(sent) < 1_000
    monkeypatch.chdir("/")
    other = pickle.loads(sent)
    assert_finds(other, rows)
    assert (other.path, other.sha256) == (read.path, read.sha256)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "line 1: the table is empty; give a cluster table"),
        ("\n\n", "line 1"),
        ("P1\tP1\nP1 P2\n", "line 2: 'P1 P2' is not"),
        ("P1\tP1\nP1\tP2\tP3\n", "line 2"),
        ("P1\tP1\n\nP1\t\n", "line 3"),
    ],
)
def test_an_invalid_table_is_an_error_with_its_line(table, content, message):
    with pytest.raises(InputDataError, match=rf"table\.tsv, {message}"):
        ClusterTable(table(content))


# --- splits


def cluster_split(path, *rest):
    return ClusterSplit(ClusterTable(path), *rest)


def split_of(rule, identifier):
    # The sequence has no say.
    digest = random.Random(identifier).randbytes(16)
    return rule.split_of(Record(identifier, identifier, "MKV", 1), digest)


def notes_of(rule, identifier, split):
    return list(rule.notes_of(Record(identifier, identifier, "MKV", 1), split))


@pytest.fixture(scope="module")
def clusters():
    """Representatives and their members: 3,000 proteins in 600 clusters."""
    rng = random.Random(0)
    names = [f"P{i:05d}" for i in range(3_000)]
    clusters = {names[5 * i]: names[5 * i : 5 * i + 5] for i in range(600)}
    for members in clusters.values():
        rng.shuffle(members)
    return clusters


def rows_of(clusters):
    return [(one, member) for one, members in clusters.items() for member in members]


def test_no_cluster_is_divided(table, clusters):
    rule = cluster_split(table(rows_of(clusters)), TENTHS)
    sides = {one: {split_of(rule, name) for name in members} for one, members in clusters.items()}
    assert all(len(side) == 1 for side in sides.values())
    counts = [side.pop() for side in sides.values()]
    for side, share in (("train", 0.8), ("valid", 0.1), ("test", 0.1)):
        assert abs(counts.count(side) - 600 * share) < 5 * (600 * share * (1 - share)) ** 0.5


def test_only_the_representative_determines_the_split(table, clusters):
    """Other clusters, other members and the order of the table do not move a cluster."""
    rule = cluster_split(table(rows_of(clusters)), TENTHS)
    rows = [(one, other) for one, other in rows_of(clusters) if one < "P02000"]
    rows += [(one, f"{one}-new") for one in clusters if one < "P02000"]
    random.Random(1).shuffle(rows)
    later = cluster_split(table(rows, "later.tsv"), TENTHS)
    for one, member in rows:
        assert split_of(later, member) == split_of(rule, one)


def test_a_record_missing_from_the_table_is_split_by_its_own_name(table, clusters):
    rule = cluster_split(table(rows_of(clusters)), TENTHS)
    alone = cluster_split(table([("X", "X")], "other.tsv"), TENTHS)
    strangers = [f"Q{i}" for i in range(1_000)]
    sides = [split_of(rule, name) for name in strangers]
    assert sides == [split_of(alone, name) for name in strangers]
    assert {"train", "valid", "test"} == set(sides)
    # Each of those that a test set could be wrong about is noted, and no other.
    for name, side in zip(strangers, sides, strict=True):
        assert notes_of(rule, name, side) == ([] if side == "train" else [UNCLUSTERED])
    for members in clusters.values():
        for name in members:
            assert notes_of(rule, name, split_of(rule, name)) == []


@pytest.fixture
def kinases(table):
    """A family of every 50th protein."""
    rows = [(f"P{i:05d}", "PF00069") for i in range(0, 3_000, 50)]
    return HeldOutFamilies(table(rows, "families.tsv"), ["PF00069"])


def test_a_cluster_with_a_held_out_member_is_held_out_and_noted(table, clusters, kinases):
    path = table(rows_of(clusters))
    rule = FamilySplit(kinases, cluster_split(path, TENTHS, kinases))
    without = cluster_split(path, TENTHS)
    for members in clusters.values():
        sides = {split_of(rule, name) for name in members}
        if any(kinases.families_of(name) for name in members):
            assert sides == {"test_ood_family"}
        else:
            assert sides == {split_of(without, name) for name in members}
    of_family = ["of the held-out family PF00069"]
    assert notes_of(rule, "P00050", "test_ood_family") == of_family
    assert notes_of(rule, "P00051", "test_ood_family") == [PULLED]
