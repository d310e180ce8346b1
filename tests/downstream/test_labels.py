"""Labels: tables, FLIP's and biotrainer's FASTA files, splits, tasks, and mistakes in them."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from protlm.downstream.labels import Example, LabeledProteins, read_labeled_proteins
from protlm.downstream.splits import cluster_names, held_out, leakage, missing, split_of
from protlm.downstream.tasks import Task, guess_task, missing_in_test, targets_of
from protlm.errors import InputDataError, UserError
from tests.analysis.test_relatives import random_sequences


@pytest.fixture
def read(tmp_path: Path):
    """Writes a file of labels and reads it."""

    def written(text: str, name: str = "labels.tsv", **options) -> LabeledProteins:
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return read_labeled_proteins(path, **options)

    return written


def test_tables_of_flip(read) -> None:
    text = (
        "sequence,target,set,validation\nMKTA,1.5,train,False\nMKTC,2,train,True\n"
        "mktd,0.1,test,\nMKTE,,train,False\nMKTF,1,,\n"
    )
    found = read(text, "x.csv.gz")
    assert [one.split for one in found.examples] == ["train", "valid", "test"]
    assert [one.label for one in found.examples] == ["1.5", "2", "0.1"]
    assert found.examples[2].sequence == "MKTD" and found.examples[0].identifier == "line 2"
    assert found.left_out == {"without a label": 1, "without a split": 1}


def test_fasta_of_proteins(read) -> None:
    text = (
        ">A TARGET=nucleus SET=train VALIDATION=False\nMK\nTA\n"
        ">B TARGET=golgi SET=train VALIDATION=True\nMKTC\n>C TARGET=golgi SET=test\nMKTD\n"
    )
    found = read(text, "x.fasta")
    assert not found.per_residue
    assert found.examples == [
        Example("A", "MKTA", "nucleus", "train"),
        Example("B", "MKTC", "golgi", "valid"),
        Example("C", "MKTD", "golgi", "test"),
    ]


def test_targets_may_have_spaces(read) -> None:
    text = (
        ">A TARGET=cell membrane SET=train OS=Homo sapiens\nMKTA\n"
        ">B SET=test extra TARGET=cell wall \nMKTC\n>C TARGET= SET=test\nMKTD\n"
    )
    found = read(text, "x.fasta")
    assert [(one.label, one.split) for one in found.examples] == [
        ("cell membrane", "train"),
        ("cell wall", "test"),
    ]
    assert found.left_out == {"without a label": 1}


def test_sequences_that_contradict_each_other_are_refused(read, tmp_path: Path) -> None:
    (tmp_path / "x.fasta").write_text(">A\nMKTA\n>A\nMKTC\n")
    with pytest.raises(InputDataError, match="has different sequences of A; remove all but one"):
        read("id\tlabel\nA\t1\n", sequences=tmp_path / "x.fasta")
    (tmp_path / "x.fasta").write_text(">A\nMKTA\n>A\nMKTA\n")
    found = read("id\tlabel\nA\t1\n", sequences=tmp_path / "x.fasta")
    assert found.examples[0].sequence == "MKTA"
    (tmp_path / "x.fasta").write_text(">A\nMKTA\n>B\n\n")
    with pytest.warns(UserWarning, match="x.fasta: 1 of 2 records rejected"):
        read("id\tlabel\nA\t1\n", sequences=tmp_path / "x.fasta")


def test_fasta_of_residues(read, tmp_path: Path) -> None:
    (tmp_path / "x.fasta").write_text(">A\nMKTA\n>B\nMKT\n")
    text = ">A SET=train VALIDATION=False\nHHE?\n>B SET=test VALIDATION=False\nHEE\n"
    found = read(text, "labels.fasta", sequences=tmp_path / "x.fasta")
    assert found.per_residue
    assert found.examples[0] == Example("A", "MKTA", "HHE?", "train")
    with pytest.raises(InputDataError, match="3: 2 labels for the 3 residues of B"):
        read(">A SET=train\nHHEE\n>B SET=test\nHE\n", "bad.fasta", sequences=tmp_path / "x.fasta")


def test_tables_with_accessions_find_their_sequences(read, tmp_path: Path) -> None:
    (tmp_path / "x.fasta").write_text(">sp|P12345|A_B\nMKTA\n")
    found = read("accession\tlabel\tplace\nP12345\t1\tx\n", sequences=tmp_path / "x.fasta")
    assert found.examples[0].sequence == "MKTA" and found.examples[0].label == "1"
    found = read(
        "accession\tlabel\tplace\nP12345\t1\tx\n", sequences=tmp_path / "x.fasta", column="place"
    )
    assert found.examples[0].label == "x"
    # The reader shortens headers of UniProt, whose identifiers may be whole in a table.
    found = read("identifier\tlabel\nsp|P12345|A_B\t1\n", sequences=tmp_path / "x.fasta")
    assert found.examples[0].sequence == "MKTA"


def test_options_of_tables_are_refused_for_fasta_files(read) -> None:
    text = ">A TARGET=HHEE\nMKTA\n"
    for options in ({"column": "place"}, {"per_residue": True}):
        with pytest.raises(UserError, match="leave --label and --per-residue out"):
            read(text, "x.fasta", **options)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("identifier\tlabel\nA\t1\n", "has no sequence; add a column sequence, or --sequences"),
        ("identifier\tsequence\nA\tMK\n", "not label; choose the column of the labels: --label"),
        ("name\tlabel\nA\tMK\n", "add a column identifier or sequence"),
        ("id\tsequence\tlabel\nA\tMK\t1\nA\tMK\t2\n", "line 3: A is repeated"),
        ("id\tsequence\tlabel\tsplit\nA\tMK\t1\tfold3\n", "line 2: the split 'fold3' is not one"),
        ("sequence\ttarget\tset\tvalidation\nMK\t1\ttrain\tyes\n", "validation 'yes' is not one"),
        ("id\tsequence\tlabel\nA\tMK\t\n", "has no labels"),
    ],
)
def test_mistakes_in_tables(read, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read(text)


def test_tasks_are_guessed() -> None:
    assert guess_task(["HH"], per_residue=True) is Task.residue_classes
    assert guess_task([str(n) for n in range(11)], per_residue=False) is Task.number
    assert guess_task([str(n) for n in range(10)], per_residue=False) is Task.one_class
    assert guess_task(["1", "a"], per_residue=False) is Task.one_class
    assert guess_task(["a,b", "a"], per_residue=False) is Task.several_classes


def test_targets() -> None:
    several = targets_of(["b;a", "c", "a; b"], Task.several_classes, min_count=2)
    assert several.classes == ["a", "b"]
    assert several.values.tolist() == [[True, True], [False, False], [True, True]]
    residues = targets_of(["H?E", "??H"], Task.residue_classes)
    assert residues.classes == ["E", "H"] and residues.values.tolist() == [1, 0, 1]
    assert residues.groups.tolist() == [0, 0, 1] and residues.places is not None
    assert [place.tolist() for place in residues.places] == [[0, 2], [2]]
    with pytest.raises(InputDataError, match="'x' is not a number"):
        targets_of(["1", "x"], Task.number)
    with pytest.raises(InputDataError, match="all labels are a"):
        targets_of(["a", "a"], Task.one_class)
    with pytest.raises(UserError, match="smaller --min-count"):
        targets_of(["a,b", "c"], Task.several_classes, min_count=3)


def test_classes_that_are_not_tested_are_named() -> None:
    rows = np.arange(4)
    one = targets_of(["a", "b", "c", "a"], Task.one_class)
    assert missing_in_test(one, rows) is None
    found = missing_in_test(one, rows[:2])
    assert found is not None and "lack 1 of 3 classes (c), which the metrics do not" in found
    assert "lack 2 of 3 classes (b, c), so the metrics mean nothing" in (
        missing_in_test(one, rows[3:]) or ""
    )
    several = targets_of(["a;b", "b", "a", "b"], Task.several_classes)
    assert "lack 1 of 2 classes (a)" in (missing_in_test(several, rows[[1, 3]]) or "")
    assert missing_in_test(targets_of(["1", "2.5"], Task.number), rows[:1]) is None


def test_whole_clusters_are_drawn() -> None:
    sequences = random_sequences(40)
    examples = [Example(str(n), one, "1", cluster=f"c{n // 4}") for n, one in enumerate(sequences)]
    split = split_of(examples, None, seed=1)
    assert len(split.test) == 8 and len(split.train) == 32 and not len(split.valid)
    assert not set(split.test // 4) & set(split.train // 4)
    assert split_of(examples, None, seed=1).test.tolist() == split.test.tolist()
    by_table = split_of(examples, {str(n): str(n % 2) for n in range(40)}, seed=1)
    assert len(set(by_table.groups)) == 2
    is_out = held_out(split.groups[split.train], 0.2, seed=0)
    assert is_out.sum() == 4
    assert not set(split.train[is_out] // 4) & set(split.train[~is_out] // 4)


def test_a_fraction_of_the_proteins_is_held_out() -> None:
    """Not of the groups, of which one has half of the proteins."""
    groups = np.array([0] * 50 + [*range(1, 51)])
    for seed in range(5):
        is_out = held_out(groups, 0.2, seed=seed)
        assert is_out.sum() == 20 and not is_out[:50].any()
    assert held_out(np.array([7, 7, 3, 7]), 0.2, seed=0).tolist() == [False, False, True, False]
    with pytest.raises(InputDataError, match=r"left to divide \(\d+\) are in one cluster"):
        held_out(np.array([1, 1]), 0.2, seed=0)


def test_tables_are_searched_by_accession() -> None:
    examples = [Example("P1", "MKTA", "1"), Example("sp|P2|X", "MKTC", "1")]
    for table in ({"sp|P1|A": "c", "P2": "c"}, {"tr|P1|A": "c", "sp|P2|X": "c"}):
        assert cluster_names(examples, table) == ["c", "c"]
        assert missing(examples, table) == 0
    assert missing(examples, {"P1": "c"}) == 1
    with pytest.raises(InputDataError, match=r"none of the 2 proteins.*identifiers like P1"):
        split_of(examples, {"Q1": "c"}, seed=0)


def test_of_equal_sequences_one_with_a_cluster_decides() -> None:
    """Also if the copy without a cluster comes first."""
    examples = [Example("A", "MKTA", "1"), Example("B", "MKTA", "1"), Example("C", "MKTC", "1")]
    assert cluster_names(examples, {"B": "c", "C": "c"}) == ["c", "c", "c"]
    assert cluster_names(examples, {"C": "c"}) == ["only A", "only A", "c"]


def test_without_splits_and_clusters_nothing_is_split() -> None:
    examples = [Example("A", "MKTA", "1"), Example("B", "MKTC", "2")]
    with pytest.raises(InputDataError, match=r"neither splits nor clusters.*--cluster"):
        split_of(examples, None, seed=0)
    with pytest.raises(InputDataError, match="no protein is in the split test"):
        split_of([Example("A", "MKTA", "1", "train")], None, seed=0)


def test_leaks_are_counted_and_said() -> None:
    one, two, three, four = random_sequences(4)
    examples = [
        Example("A", one, "1", "train", "c1"),
        Example("B", two, "1", "valid", "c2"),
        Example("C", one, "1", "test", "c3"),
        Example("D", two[:30] + four[:30], "1", "test", "c4"),
        Example("E", three, "1", "test", "c2"),
        Example("F", four, "1", "test", "c6"),
    ]
    found = leakage(examples, split_of(examples, None, seed=0), None)
    # C has the sequence of A, and is put into its cluster.
    assert (found.identical, found.same_cluster, found.similar) == (1, 2, 2)
    assert found.is_similar.tolist() == [True, True, False, False]
    assert "of 4 test proteins, 1 have the sequence of one" in (found.describe(4) or "")
    clean = [examples[0], examples[-1]]
    assert leakage(clean, split_of(clean, None, seed=0), None).describe(1) is None
