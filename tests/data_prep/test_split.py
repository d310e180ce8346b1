"""Splits by hash, by table, by families held out, and by clusters of a table."""

import pickle
import random

import pytest

from protlm.data.records import Record
from protlm.data.records.record import entry_of
from protlm.data_prep import clusters as module
from protlm.data_prep.clusters import PULLED, UNCLUSTERED, ClusterSplit, ClusterTable, name_hash
from protlm.data_prep.families import PAPER_FAMILIES, FamilySplit, HeldOutFamilies
from protlm.data_prep.split import HashSplit, TableSplit
from protlm.downstream.label_files import split_named
from protlm.system.errors import InputDataError, UserError


def record(identifier):
    return Record(identifier, identifier, "MKV", 1)


def test_the_hash_is_a_number_between_0_and_1():
    """The first eight bytes of the hash, big-endian, as a fraction; nothing else counts."""
    rule = HashSplit(valid_fraction=0.25, test_fraction=0.5)
    places = {0x00: "valid", 0x3F: "valid", 0x40: "test", 0xBF: "test", 0xC0: "train"}
    for first, split in places.items():
        for last, name in ((b"\x00", "P1"), (b"\xfe", "P2")):
            assert rule.split_of(record(name), bytes([first]) + last * 15) == split


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
    found = [rule.split_of(record(name), bytes(16)) for name in ("P1", "P2", "P3")]
    assert found == ["test_iid", "train", None]
    assert rule.describe()["table"] == name


def test_splits_have_the_names_that_labels_take(table, capsys):
    names = ["train", "Training", "val", "DEV", "validation", "valid", "Test", "test_ood", "pred"]
    rows = "".join(f"P{n}\t{name}\n" for n, name in enumerate(names))
    rule = TableSplit(table(f"accession\tsplit\n{rows}P0\ttraining\n"))
    found = [rule.split_of(record(f"P{n}"), bytes(16)) for n in range(len(names))]
    assert found == [*["train"] * 2, *["valid"] * 4, "test", "test_ood", "pred"]
    assert [split_named(one, ["test_ood"], "") for one in names] == found
    told = capsys.readouterr().err
    assert "table.tsv: read Training as train, val as valid, DEV as valid, validation as" in told
    assert "pred" not in told
    TableSplit(table("accession\tsplit\nP1\tvalid\n"))
    assert not capsys.readouterr().err


# What reads a table, the table, and what is said of it.
INVALID = [
    (TableSplit, "", "line 1: the table is empty; give a split table"),
    (TableSplit, "accession,split\nP1,train\n", "no column accession.*by tabs"),
    (TableSplit, "P1\ttrain\n", "no column accession"),
    (TableSplit, "accession\tsplit\nP1\n", r"line 2: 1 fields, not 2, in 'P1'$"),
    (TableSplit, "accession\tsplit\nP1\ttrain\tx\n", r"line 2: 3 fields, .*'P1\\ttrain\\tx'$"),
    (TableSplit, f"accession\tsplit\n{'W' * 999}\n", r"line 2: 1 fields, not 2, in 'W{79}$"),
    (TableSplit, "accession\tsplit\nP1\t../../x\n", "line 2.*small letters"),
    (TableSplit, "accession\tsplit\nP1\tMy-Split\n", "line 2: 'My-Split' is not a valid split"),
    (TableSplit, "accession\tsplit\nP1\tval\nP1\ttrain\n", "line 3: P1 is in valid and in train"),
    (TableSplit, "accession\tsplit\nP1\t\n", "line 2"),
    (TableSplit, "accession\tsplit\nP1\ttrain\nP1\ttest\n", "line 3: P1 is in train and in test"),
    (HeldOutFamilies, "", "line 1"),
    (HeldOutFamilies, "Entry,Pfam\nP00001,PF00069\n", "line 1"),
    (HeldOutFamilies, "Entry\tName\nP00001\tx\n", "no entry of PF03272, .* 'Entry, Name'"),
    (HeldOutFamilies, "Entry\tPfam\nP00001\n", "line 2: 1 fields, not 2, .* in 'P00001';"),
    (HeldOutFamilies, "Entry\tPfam\nP1\tPF00069;\tx\n", "line 2: 3 fields, not 2, .* in 'P1.t"),
    (HeldOutFamilies, "Entry\tPfam\nP00001\tPF00069;\n\tPF00069;\n", "line 3"),
    (ClusterTable, "", "line 1: the table is empty; give a cluster table"),
    (ClusterTable, "\n\n", "line 1"),
    (ClusterTable, "P1\tP1\nP1 P2\n", "line 2: 'P1 P2' is not"),
    (ClusterTable, "P1\tP1\nP1\tP2\tP3\n", "line 2"),
    (ClusterTable, "P1\tP1\n\nP1\t\n", "line 3"),
]


@pytest.mark.parametrize(("reader", "text", "message"), INVALID, ids=range(len(INVALID)))
def test_an_invalid_table_is_an_error_with_its_line(table, reader, text, message):
    with pytest.raises(InputDataError, match=rf"table\.tsv,? .*{message}"):
        reader(table(text))


ALL_TRAIN = HashSplit(valid_fraction=0, test_fraction=0)
EXPORT = "Entry\tPfam\nP00001\tPF00069;PF07714;\nP00002\t\nP00003\tPF07714;\nP00004\tPF00001;\n"


def held_out(rule, identifiers):
    sides = {name: rule.split_of(record(name), bytes(16)) for name in identifiers}
    assert set(sides.values()) <= {"train", "test_ood_family"}
    return {name for name, side in sides.items() if side != "train"}


@pytest.mark.parametrize(
    "text",
    [
        EXPORT,
        EXPORT.replace("\n", "\r\n"),
        "Entry Name\tPfam\tEntry\nX_Y\tPF07714;\tP00001\nX_Z\tPF07714.3\tP00003\n",
        "P00001\tPF00069\nP00002\t\nP00001\tPF07714\n\nP00003\tPF07714\n",
        "accession\tpfam\nP00001\tPF07714\nP00003\tPF07714\n",
        "pfamseq_acc\tseq_version\tpfamA_acc\nP00001\t1\tPF07714\nP00003\t2\tPF07714\n",
    ],
)
@pytest.mark.parametrize("name", ["families.tsv", "families.tsv.gz"])
def test_every_form_of_the_table_is_equivalent(table, text, name):
    rule = FamilySplit(HeldOutFamilies(table(text, name), ["PF07714"]), ALL_TRAIN)
    assert held_out(rule, [f"P0000{i}" for i in range(9)]) == {"P00001", "P00003"}


def test_isoforms_versions_and_clusters_named_by_an_entry_follow_it(table):
    rule = FamilySplit(HeldOutFamilies(table(EXPORT), ["PF00069"]), ALL_TRAIN)
    followers = {"P00001-2", "P00001.7", "UniRef50_P00001", "P00001"}
    others = {"P000012", "XP00001", "P00001-x", "P00001-2-3", "P00003-2", "UniRef50_P00003"}
    assert held_out(rule, followers | others) == followers
    assert entry_of("A0A017PJG5-12") == "A0A017PJG5"
    assert entry_of("gene-2") == "gene-2"


def test_the_default_families_are_the_papers(table):
    text = "".join(f"Q{i:05d}\t{family}\n" for i, family in enumerate(PAPER_FAMILIES))
    families = HeldOutFamilies(table(text + "Q99999\tPF00001\n"))
    assert len(PAPER_FAMILIES) == len(set(PAPER_FAMILIES)) == 20
    assert [families.families_of(f"Q{i:05d}") for i in range(20)] == [(f,) for f in PAPER_FAMILIES]
    assert families.families_of("Q99999") == ()
    assert families.absent == ()


def test_a_family_is_held_out_as_a_whole_and_nothing_else(table):
    """Compared with a scan of all lines: no entry of a held-out family is in another split."""
    rows = {f"Q{i:05d}": [f"PF{i * 7 % 30:05d}", f"PF{i % 11:05d}"] for i in range(3_000)}
    lines = [(entry, f"{';'.join(families)};") for entry, families in rows.items()]
    wanted = {"PF00003", "PF00028"}
    families = HeldOutFamilies(table(lines), sorted(wanted))
    expected = {entry for entry, families in rows.items() if wanted & set(families)}
    assert 100 < len(expected) < 1_000
    assert held_out(FamilySplit(families, ALL_TRAIN), rows) == expected
    # A few entries of a large table take little memory.
    one = HeldOutFamilies(table([*lines, ("Q99999", "PF00031")]), ["PF00031"])
    assert len(pickle.dumps(one)) < 1_000


def test_other_records_follow_the_other_rule(table):
    rule = FamilySplit(HeldOutFamilies(table(EXPORT), ["PF00001"]), HashSplit(0.5, 0))
    assert rule.split_of(record("P00001"), bytes(16)) == "valid"
    assert rule.split_of(record("P00001"), b"\xff" * 16) == "train"
    assert rule.split_of(record("P00004"), b"\xff" * 16) == "test_ood_family"


@pytest.mark.parametrize("text", [EXPORT, "P00001\tPF07714\nP00001\tPF00069\nP00001\tPF07714\n"])
def test_every_family_of_a_held_out_record_is_noted(table, text):
    rule = FamilySplit(HeldOutFamilies(table(text), ["PF00069", "PF07714", "PF99999"]), ALL_TRAIN)
    noted = list(rule.notes_of(record("P00001"), "test_ood_family"))
    assert noted == ["of the held-out family PF00069", "of the held-out family PF07714"]
    assert list(rule.notes_of(record("P00002"), "train")) == []
    described = rule.describe()
    assert described["families"] == ["PF00069", "PF07714", "PF99999"]
    assert described["absent_from_table"] == ["PF99999"]
    assert described["otherwise"] == ALL_TRAIN.describe()


def test_families_are_words_of_any_column(table):
    text = (
        "Entry\tInterPro\tProtein families\tGene Ontology\n"
        "P00001\tIPR000719;IPR011009;\tProtein kinase superfamily, Tyr protein kinase family\t\n"
        "P00002\tIPR0007190;\tGlobin family\tATP binding [GO:0005524]; heme [GO:0020037]\n"
        "P00003\t\t\t\n"
    )
    alike = {"IPR0007190": {"P00002"}, "Globin family": {"P00002"}, "GO:0005524": {"P00002"}}
    for word, entries in {**alike, "Tyr protein kinase family": set(), "kinase f": set()}.items():
        rule = FamilySplit(HeldOutFamilies(table(text), ["IPR000719", word]), ALL_TRAIN)
        assert held_out(rule, ["P00001", "P00002", "P00003"]) == {"P00001"} | entries
    assert HeldOutFamilies(table(text), ["IPR000719", "heme"]).rows_by_column == {
        **{"InterPro": 1, "Gene Ontology": 1}
    }


def test_invalid_families_are_rejected(table):
    with pytest.raises(InputDataError, match=r"no entry of kinase in its columns 'Entry, Pfam'"):
        HeldOutFamilies(table(EXPORT), ["kinase"])
    with pytest.raises(InputDataError, match=r"no entry of PF99998, PF99999"):
        HeldOutFamilies(table(EXPORT), ["PF99999", "PF99998"])


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
    assert {split_in(rule, name) for name in names} == {split_in(rule, "R")}


def test_a_record_missing_from_the_table_is_a_cluster_by_itself(table, rows):
    read = ClusterTable(table(rows))
    found, is_listed = read.clusters_of(["Q1", "P1", "sp|Q2|X_Y", "Q2"])
    assert is_listed.tolist() == [False, True, False, False]
    assert found[[0, 2, 3]].tolist() == [name_hash(name) for name in ("Q1", "Q2", "Q2")]
    assert read.clusters_of([])[0].tolist() == []


def test_a_member_of_two_clusters_is_rejected_with_both_lines(table, rows):
    """Two records of one name, in clusters that may be in different splits, would leak."""
    line, representative = next((n, r) for n, (r, m) in enumerate(rows, 1) if m == "P7")
    clusters = rf"two clusters, of other here and of {representative} in line {line};"
    with pytest.raises(InputDataError, match=rf"two\.tsv, line 2051: P7 is in {clusters}"):
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


# --- splits


def split_in(rule, identifier):
    """The split of a name; the sequence has no say."""
    return rule.split_of(record(identifier), random.Random(identifier).randbytes(16))


def notes_of(rule, identifier, split):
    return list(rule.notes_of(record(identifier), split))


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


@pytest.fixture
def rule(table, clusters):
    return ClusterSplit(ClusterTable(table(rows_of(clusters))), TENTHS)


def test_no_cluster_is_divided(rule, clusters):
    sides = {one: {split_in(rule, name) for name in members} for one, members in clusters.items()}
    assert all(len(side) == 1 for side in sides.values())
    counts = [side.pop() for side in sides.values()]
    for side, share in (("train", 0.8), ("valid", 0.1), ("test", 0.1)):
        assert abs(counts.count(side) - 600 * share) < 5 * (600 * share * (1 - share)) ** 0.5


def test_only_the_representative_determines_the_split(rule, table, clusters):
    """Other clusters, other members and the order of the table do not move a cluster."""
    rows = [(one, other) for one, other in rows_of(clusters) if one < "P02000"]
    rows += [(one, f"{one}-new") for one in clusters if one < "P02000"]
    random.Random(1).shuffle(rows)
    later = ClusterSplit(ClusterTable(table(rows, "later.tsv")), TENTHS)
    for one, member in rows:
        assert split_in(later, member) == split_in(rule, one)


def test_a_record_missing_from_the_table_is_split_by_its_own_name(rule, table, clusters):
    alone = ClusterSplit(ClusterTable(table([("X", "X")], "other.tsv")), TENTHS)
    strangers = [f"Q{i}" for i in range(1_000)]
    sides = [split_in(rule, name) for name in strangers]
    assert sides == [split_in(alone, name) for name in strangers]
    assert {"train", "valid", "test"} == set(sides)
    # Each of those that a test set could be wrong about is noted, and no other.
    for name, side in zip(strangers, sides, strict=True):
        assert notes_of(rule, name, side) == ([] if side == "train" else [UNCLUSTERED])
    for _, name in rows_of(clusters):
        assert notes_of(rule, name, split_in(rule, name)) == []


def test_a_cluster_with_a_held_out_member_is_held_out_and_noted(table, clusters):
    rows = [(f"P{i:05d}", "PF00069") for i in range(0, 3_000, 50)]
    kinases = HeldOutFamilies(table(rows, "families.tsv"), ["PF00069"])
    read = ClusterTable(table(rows_of(clusters)))
    rule = FamilySplit(kinases, ClusterSplit(read, TENTHS, kinases))
    without = ClusterSplit(read, TENTHS)
    for members in clusters.values():
        sides = {split_in(rule, name) for name in members}
        if any(kinases.families_of(name) for name in members):
            assert sides == {"test_ood_family"}
        else:
            assert sides == {split_in(without, name) for name in members}
    assert notes_of(rule, "P00050", "test_ood_family") == ["of the held-out family PF00069"]
    assert notes_of(rule, "P00051", "test_ood_family") == [PULLED]
