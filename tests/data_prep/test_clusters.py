"""Whole clusters go to one split."""

import gzip
import pickle
import random

import pytest

from protlm.data.records import Record
from protlm.data_prep.cluster_table import ClusterTable
from protlm.data_prep.clusters import PULLED, UNCLUSTERED, ClusterSplit
from protlm.data_prep.families import FamilySplit, HeldOutFamilies
from protlm.data_prep.split import HashSplit
from protlm.system.errors import InputDataError
from protlm.system.paths import sample_dir

TENTHS = HashSplit(valid_fraction=0.1, test_fraction=0.1)


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


@pytest.fixture
def table(tmp_path):
    def write(rows, name="cluster.tsv"):
        path = tmp_path / name
        content = "".join(f"{one}\t{other}\n" for one, other in rows).encode()
        path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
        return path

    return write


def rows_of(clusters):
    return [(one, member) for one, members in clusters.items() for member in members]


@pytest.mark.parametrize("name", ["cluster.tsv", "cluster.tsv.gz"])
def test_no_cluster_is_divided(table, clusters, name):
    rule = cluster_split(table(rows_of(clusters), name), TENTHS)
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


def test_clusters_of_the_shipped_sample(table):
    with gzip.open(sample_dir() / "uniprot_sample.splits.tsv.gz", "rt") as file:
        rows = [line.rstrip("\n").split("\t") for line in file][1:]
    cluster_of = {row[0]: row[3] for row in rows}
    rule = cluster_split(table([(one, member) for member, one in cluster_of.items()]), TENTHS)
    sides = {}
    for member, one in cluster_of.items():
        sides.setdefault(one, set()).add(split_of(rule, member))
    assert all(len(side) == 1 for side in sides.values())
    assert {side for one in sides.values() for side in one} == {"train", "valid", "test"}


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


def test_only_held_out_members_are_in_memory(table):
    """At 1 + 1 % some 4 % of the names are kept, at 8 bytes each."""
    rows = [(f"P{i // 2}", f"P{i}") for i in range(20_000)]
    rule = cluster_split(table(rows), HashSplit(0.01, 0.01))
    assert 0.02 * 20_000 * 8 < len(pickle.dumps(rule)) < 0.05 * 20_000 * 8 + 1_000


def test_names_are_those_of_mmseqs(table):
    """MMseqs2 writes P12345 for sp|P12345|AATM_RABIT; a table may contain either."""
    bare, full = table([("P1", "P1"), ("P1", "P2")]), [("sp|P1|A_B", "sp|P1|A_B")]
    full = table([*full, ("sp|P1|A_B", "tr|P2|C_D")], "full.tsv")
    for name in ("P2", "tr|P2|C_D"):
        sides = [split_of(cluster_split(path, HashSplit(0.5, 0)), name) for path in (bare, full)]
        assert sides[0] == sides[1] == split_of(cluster_split(bare, HashSplit(0.5, 0)), "P1")


@pytest.fixture
def kinases(tmp_path, clusters):
    """A family of every 50th protein."""
    path = tmp_path / "families.tsv"
    path.write_text("".join(f"P{i:05d}\tPF00069\n" for i in range(0, 3_000, 50)))
    return HeldOutFamilies(path, ["PF00069"])


def test_a_cluster_with_a_held_out_member_is_held_out_with_it(table, clusters, kinases):
    path = table(rows_of(clusters))
    rule = FamilySplit(kinases, cluster_split(path, TENTHS, kinases))
    without = cluster_split(path, TENTHS)
    for members in clusters.values():
        sides = {split_of(rule, name) for name in members}
        if any(kinases.families_of(name) for name in members):
            assert sides == {"test_ood_family"}
        else:
            assert sides == {split_of(without, name) for name in members}


def test_records_held_out_because_of_their_cluster_are_noted(table, clusters, kinases):
    rule = FamilySplit(kinases, cluster_split(table(rows_of(clusters)), TENTHS, kinases))
    of_family = ["of the held-out family PF00069"]
    assert notes_of(rule, "P00050", "test_ood_family") == of_family
    assert notes_of(rule, "P00051", "test_ood_family") == [PULLED]


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
def test_an_invalid_table_is_an_error_with_its_line(tmp_path, content, message):
    path = tmp_path / "cluster.tsv"
    path.write_text(content)
    with pytest.raises(InputDataError, match=rf"cluster\.tsv, {message}"):
        cluster_split(path, TENTHS)


def test_a_member_of_two_clusters_is_an_error_with_its_lines(table, clusters):
    """Two records of one name, in clusters that may be in different splits, would leak."""
    rule = cluster_split(table(rows_of(clusters)), TENTHS)
    sides = {one: split_of(rule, one) for one in clusters}
    train = [one for one, side in sides.items() if side == "train"]
    test = next(one for one, side in sides.items() if side == "test")
    # It does not matter on which side the clusters are.
    for other, member in [(test, train[0]), (train[0], test), (train[0], train[1])]:
        rows = [*rows_of(clusters), (other, member)]
        line = rows_of(clusters).index((member, member)) + 1
        with pytest.raises(
            InputDataError,
            match=rf"two\.tsv, line 3001: {member} is in two clusters, of {other} here and of "
            rf"{member} in line {line};",
        ):
            cluster_split(table(rows, "two.tsv"), TENTHS)
