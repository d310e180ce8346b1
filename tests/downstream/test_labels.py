"""Labels: tables, FLIP's and biotrainer's FASTA files, splits, tasks, and mistakes in them."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from protlm.data.tables import MISSING
from protlm.downstream.examples import targets_from
from protlm.downstream.label_files import Example
from protlm.downstream.splits import cluster_names, held_out, leakage, split_of, with_clusters
from protlm.downstream.tasks import missing_in_test, targets_of
from protlm.options.labels import Form, LabelOptions, Task
from protlm.system.errors import InputDataError, UserError
from tests.data.test_relatives import random_sequences


def test_tables_of_flip(read) -> None:
    text = (
        "sequence,target,set,validation\nMKTA,1.5,train,False\nMKTC,2,train,True\n"
        "mktd,0.1,test,\nMKTE,,train,False\nMKTF,1,,\n"
    )
    found = read(text, "x.csv.gz")
    assert found.examples == [
        Example("line 2", "MKTA", "1.5", "train"),
        Example("line 3", "MKTC", "2", "valid"),
        Example("line 4", "MKTD", "0.1", "test"),
    ]
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
    text = (
        ">A TARGET=cell membrane SET=train OS=Homo sapiens\nMKTA\n"
        ">B SET=test extra TARGET=cell wall \nMKTC\n>C TARGET= SET=test\nMKTD\n"
    )
    found = read(text, "x.fasta")
    assert found.examples == [
        Example("A", "MKTA", "cell membrane", "train"),
        Example("B", "MKTC", "cell wall", "test"),
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
    # Digits of peptides of three lengths are no numbers.
    assert read(">A TARGET=31\nMK\n>B TARGET=175\nMKT\n>C TARGET=2946\nMKTA\n", "y.fa").per_residue
    with pytest.raises(InputDataError, match="3: 2 labels for the 3 residues of B; write a letter"):
        read(">A SET=train\nHHEE\n>B SET=test\nHE\n", "bad.fasta", sequences=tmp_path / "x.fasta")


def test_tables_with_accessions_find_their_sequences(read, tmp_path: Path) -> None:
    (tmp_path / "x.fasta").write_text(">sp|P12345|A_B\nMKTA\n")
    for text, form, label in (
        ("accession\tlabel\tplace\nP12345\t1\tx\n", Form(), "1"),
        ("accession\tlabel\tplace\nP12345\t1\tx\n", Form(column="place"), "x"),
        # The reader shortens headers of UniProt, whose identifiers may be whole in a table.
        ("identifier\tlabel\nsp|P12345|A_B\t1\n", Form(), "1"),
    ):
        (found,) = read(text, sequences=tmp_path / "x.fasta", form=form).examples
        assert (found.sequence, found.label) == ("MKTA", label)


MISTAKES = [
    ("identifier\tlabel\nA\t1\n", "has no sequence; add a column sequence, or a file"),
    ("identifier\tsequence\nA\tMK\n", "has the columns identifier, sequence, not label$"),
    ("name\tlabel\nA\tMK\n", "add a column identifier or sequence"),
    ("id\tsequence\tlabel\nA\tMK\t1\nA\tMK\t2\n", "line 3: A is repeated"),
    ("id\tsequence\tlabel\tsplit\nA\tMK\t1\tfold3\n", "line 2: the split 'fold3' is not one"),
    ("sequence\ttarget\tset\tvalidation\nMK\t1\ttrain\tyes\n", "validation 'yes' is not one"),
    ("id\tsequence\tlabel\nA\tMK\t\n", "has no labels"),
    (">p|TARGET=a|SET=train\nMKTA\n", r"\(1 without a label\); give a row, or .* TARGET= after"),
    (">P1 Cell.membrane-M\nMKTA\n", "headers lack TARGET= and SET=.* second word of the headers"),
    (">P1 SET=train\nHHEE\n", "if the letters are labels of residues, their sequences"),
    (">P1 TARGET=a SET=train MASK=011\nMKT\n", "line 1: MASK= needs a label of each residue"),
    ("id\taa_seq\tinput\tlabel\nA\tMK\tMK\t1\n", "columns aa_seq and input; rename"),
    ("seq\tlabel\nMK\t1\nMK\t2\n", "line 3: the sequence of line 2 is repeated, with another lab"),
    ("seq\tlabel\tset\nMK\t1\ttest\nMK\t1\ttest2\n", "of line 2 is repeated, with the split test"),
    ("id\tseq\tlabel\tset\nA\tMK\t1\tCASP12\n", "'CASP12' is not one .* say that it is a test set"),
    ("id\tseq\tlabel\tset\nA\tMK\t1\ttrain\nA\tMK\t1\tval\n", "3: A is repeated, with the split t"),
    (">P1 INTERACTOR=P2 TARGET=0 SET=train\nMKT\n", "INTERACTOR=; pairs are not read"),
]


# Options of tables are not for FASTA files, nor those of FASTA files for tables.
FORMS = [
    *(
        (">A TARGET=HHEE\nMKTA\n", "letters of residues in place of these, not columns", form)
        for form in (Form(column="place"), Form(fold="x"), Form(columns=("x",)))
    ),
    ("id\tlabel\nA\t1\n", "not a FASTA file, whose headers may", Form(header="header")),
]


@pytest.mark.parametrize(
    ("text", "words", "form"), [*((*mistake, Form()) for mistake in MISTAKES), *FORMS]
)
def test_mistakes_in_files(read, text: str, words: str, form: Form) -> None:
    with pytest.raises(UserError, match=words):
        read(text, "x.fasta" if text.startswith(">") else "labels.tsv", form=form)


CELL = "Cell membrane, peripheral"
SEQUENCES = [one[: 50 + number % 9] for number, one in enumerate(random_sequences(80))]
NUMBERS = [f"{number / 7:.3f}" for number in range(80)]


@pytest.fixture
def take(read, tmp_path: Path):
    """Writes 80 labels beside sequences, and returns what they are taken for."""

    def taken(labels: list[str], sequences: list[str] = SEQUENCES, **options):
        rows = (f"P{n}\t{sequences[n]}\t{label}\n" for n, label in enumerate(labels))
        reading = LabelOptions(**options)
        text = "id\tsequence\tlabel\n" + "".join(rows)
        proteins = read(text, "x.tsv", per_residue=reading.of_residues)
        return targets_from(tmp_path / "x.tsv", proteins, reading)

    return taken


def cycle(*labels: str) -> list[str]:
    return [labels[number % len(labels)] for number in range(80)]


@pytest.mark.parametrize("missing", sorted({*MISSING, "?"}))
def test_missing_labels_are_left_out_and_counted(take, capsys, missing: str) -> None:
    assert len(take([*NUMBERS[:40], missing, *NUMBERS[41:]]).values) == 79
    said = capsys.readouterr().err
    assert "x.tsv: task: number; 79 of 80 rows are used; left out: 1 without a label" in said
    assert take([*cycle("a", "b")[:79], missing]).classes == ["a", "b"]


OTHERS = "inf -inf Infinity 1e400 >10 <0.1 0,5 12% 1_000 1e300 \u0663 nd none #VALUE! 1,234.5"


@pytest.mark.parametrize("other", OTHERS.split())
def test_numbers_with_another_label_are_refused_with_its_line(take, other: str) -> None:
    labels = [*NUMBERS[:40], other, *NUMBERS[41:]]
    words = rf"x.tsv, line 42: {re.escape(repr(other))} is not a number .* 79 of 80 .* are classes"
    with pytest.raises(InputDataError, match=words):
        take(labels)
    assert len(take(labels, task=Task.one_class).classes) == 80


# Labels, what they are taken for (a task, or a number of classes), and the length of sequences, if
# they are peptides.
TAKEN: dict[str, tuple] = {
    "ten whole numbers": (cycle(*map(str, range(10))), 10),
    "eleven whole numbers": (cycle(*map(str, range(11))), Task.number),
    "numbers and a word": (cycle("0", "1", "unknown"), 3),
    "a bound": (cycle("0", "1", ">1"), 3),
    "helices": (cycle("7 TM", "12 TM", "1 TM", "2 TM"), 4),
    "signs": (cycle("+", "-"), 2),
    "none": (cycle("none", "ATP"), 2),
    "commas in a name": (cycle(CELL, "Nucleus"), 2),
    "brackets": (cycle("[2Fe-2S]", "heme"), 2),
    "words and few numbers": ([*cycle("a", "b")[:78], "1.5", "2.5"], 4),
    "forty classes": (cycle(*(f"c{number}" for number in range(40))), 40),
    "three residues": (cycle("HHH", "EEE"), 2),
    "peptides, decimals": ([f"{n / 7:.6f}"[:8] for n in range(80)], Task.number, 8),
    "peptides, whole numbers": ([str(n * 9_973 + 100_000) for n in range(80)], Task.number, 7),
    "peptides, classes": (cycle("positive", "negative"), 2, 8),
    "peptides, classes of their length": (cycle("binder", "nobind", "strong"), 3, 6),
    "dipeptides": (cycle("10", "20"), 2, 2),
}


def shortened(length: int, *lists: list[str]) -> list[list[str]]:
    return [[one[:length] for one in some] for some in lists]


@pytest.mark.parametrize("case", TAKEN)
def test_labels_are_taken_for(take, capsys, case: str) -> None:
    labels, expected, *length = TAKEN[case]
    found = take(*shortened(*length, labels, SEQUENCES)) if length else take(labels)
    said = capsys.readouterr().err
    assert "80 of 80 rows are used" in said
    assert ("labels have commas, which are not the separator" in said) == (
        case == "commas in a name"
    )
    assert not re.search(r"% are ([^;]*) and .*% are \1[;\n]", said)
    if isinstance(expected, Task):
        assert found.task is expected
    else:
        assert found.task is Task.one_class and len(found.classes) == expected
        assert f"task: class of {len(found.classes)} classes (" in said


@pytest.mark.parametrize(
    ("labels", "separator", "classes"),
    [
        (cycle("a;b", "a"), ";", ["a", "b"]),
        (cycle("a,b", "a"), ",", ["a", "b"]),
        (cycle("3;12", "12", "7;3"), ";", ["12", "3", "7"]),
        (cycle("1.1.1.1;2.7.1.1", "2.7.1.1"), ";", ["1.1.1.1", "2.7.1.1"]),
        (cycle(f"{CELL};Nucleus", "Nucleus"), ";", [CELL, "Nucleus"]),
    ],
)
def test_lists_are_split_where_it_is_asked(take, labels, separator, classes) -> None:
    found = take(labels, separator=separator)
    assert found.task is Task.several_classes
    assert found.classes == classes


def states(length: Callable[[int], int], join: str = "", letters: str = "HEC") -> list[str]:
    return [
        join.join(letters[n % len(letters)] for n in range(length(len(one)))) for one in SEQUENCES
    ]


MEANT = {"\u22127.5": "write -100.5 or", "7.5 nM": "write 100.5 or", "7µg/mL": "write 100 or"}
MEANT |= {"7±0.1": "write 100 or", "1,7": "write 1100 or 1.100 or", "1,7,000": "write 1100000 or"}
MEANT |= {"0,7": "write 0.100 or", "1.7,5": "write 1100.5 or", "-1,7.25": "write -1100.25 or"}
LONG = "line 2: 80 of 80 labels are as long as their sequences.* a number for each; otherwise"
PEPTIDES = {
    "letters": [f"{n:08b}".replace("0", "H") for n in range(80)],
    "masks": [f"{n:08b}"[::-1] for n in range(80)],
    "digits": [str(n * 997_300 + 10_000_000) for n in range(80)],
    "half of them alike": ["C" * 8] * 40 + [f"{n:08b}" for n in range(40)],
}
REFUSED: dict[str, tuple] = {
    "percent": (cycle("12%", "13%", "14.5%"), "line 2: '12%' is not a number .* write 12 or leave"),
    "decimal commas": (
        cycle("0,5", "1"),
        "'0,5' is not a number .* write 0.5 or .* commas separate",
    ),
    "equal numbers": (cycle("1.5", "1.50"), "all labels are 1.5; give two or more that differ"),
    **{a: ([a.replace("7", str(n)) for n in range(100, 180)], b) for a, b in MEANT.items()},
    "mostly bounds": ([NUMBERS[n] if n % 5 < 2 else ">9" for n in range(80)], "line 4: '>9' is"),
    "lists of pandas": (cycle("['a', 'b']", "['a']"), "is a list as programs write it"),
    "lists of numbers": (cycle("0.5;0.7", "0.1;0.2"), "are lists of numbers; give one for each"),
    "a class each": ([f"c{n}" for n in range(80)], "80 labels would be 80 classes"),
    "nearly a class each": ([f"c{min(n, 60)}" for n in range(80)], "80 labels would be 61 classes"),
    "a list each": ([f"a{n};b{n}" for n in range(80)], "80 labels would be 160 classes"),
    "an integer each": ([str(n) for n in range(8)], "8 labels would be 8 classes.* or the task"),
    "nearly all letters": (states(lambda n: n - (n > 57)), "line 10: 72 of 80 labels are as long"),
    "words for residues": (states(lambda n: n, ";", ["in", "out"]), "'(in|out)' of a residue is n"),
    "the sequences": (SEQUENCES, "80 of 80 labels are the sequences themselves"),
    **{f"residues of peptides, {name}": (labels, LONG, 8) for name, labels in PEPTIDES.items()},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_labels_may_not_mean_is_refused(take, case: str) -> None:
    labels, words, *length = REFUSED[case]
    with pytest.raises(InputDataError, match=words):
        take(*shortened(*length, labels, SEQUENCES) if length else [labels])


def test_what_is_said_decides(take) -> None:
    letters = states(lambda n: n)
    assert take(letters, per_residue=True).classes == ["C", "E", "H"]
    assert take(letters, task=Task.one_class).task is Task.one_class


@pytest.mark.parametrize(
    ("labels", "is_said"),
    [
        (cycle(*(f"{n % 4 + 1}.{n}" for n in range(16))), True),
        (cycle(*(str(9_000 + n) for n in range(16))), True),
        (cycle(*(str(9_000 + n) for n in range(17))), False),
        (NUMBERS, False),
    ],
)
def test_numbers_that_may_be_names_of_classes_are_said(take, capsys, labels, is_said) -> None:
    for task in (None, Task.number):
        assert take(labels, task=task).task is Task.number
        words = "task: number (if these are names of classes, choose the task class); 80 of 80"
        assert (words in capsys.readouterr().err) == (is_said and task is None)


def test_sequences_are_read_as_in_fasta_files(take, capsys, read, tmp_path: Path) -> None:
    sequences = ["mkta*", "MKJA", "MK*TA", "MK-TA", "MKT1", *SEQUENCES[5:]]
    assert len(take(NUMBERS, sequences).values) == 77
    said = capsys.readouterr().err
    for words in ("1 with a rejected sequence ('*' inside", "(gap)", "(digit)", "1 J written as X"):
        assert words in said
    for other, words in (("GATTACA", "looks like DNA or RNA"), ("MdKvTa#dAp", "pairs of SaProt")):
        with pytest.raises(InputDataError, match=words):
            take(NUMBERS, [other] * 80)
    text = "".join(f">{n}\nMKTAY1\n" for n in range(1_200))
    (tmp_path / "x.fasta").write_text(f"{text}>sp|A|A_B\n\n>B\nMKTC\n")
    labels = "id\tlabel\n3\t1\nA\t1\n1100\t1\nB\t2\n"
    with pytest.warns(UserWarning, match="1,201 of 1,202 records rejected"):
        found = read(labels, sequences=tmp_path / "x.fasta")
    assert [one.identifier for one in found.examples] == ["B"]
    reasons = {"digit": 2, "blank sequence": 1}
    assert found.left_out == {f"with a rejected sequence ({why})": n for why, n in reasons.items()}
    with (
        pytest.warns(UserWarning, match="rejected"),
        pytest.raises(InputDataError, match=r"line 6: .*x.fasta has no sequence of C"),
    ):
        read(f"{labels}C\t1\n", sequences=tmp_path / "x.fasta")


# Labels of residues as they are written, and what they are taken for.
OF_RESIDUES: dict[str, tuple] = {
    "letters": (states(lambda n: n), ["C", "E", "H"]),
    "blanks": (states(lambda n: n, " "), ["C", "E", "H"]),
    "digits": (states(lambda n: n, letters="01"), ["0", "1"]),
    "numbers of classes": (states(lambda n: n, ";", "05"), ["0", "5"]),
    "lists of numpy": ([f"[{x}]" for x in states(lambda n: n, " ", ["0.", "1."])], ["0", "1"]),
    "lists of pandas": ([f"[{x}]" for x in states(lambda n: n, ", ", ["0.0", "2.0"])], ["0", "2"]),
    "proteins of one length": (cycle("I" * 50, "O" * 50), ["I", "O"], 50),
    "numbers": (states(lambda n: n, ";", ["0.5", "-1", "12"]), []),
    "large numbers": (states(lambda n: n, ";", ["1", "-1"]), []),
    "decimals of peptides": (cycle("0.5;1;2", "1;0.5;1", "2;2;1.5", "1.5;1;2"), [], 3),
}


@pytest.mark.parametrize("case", OF_RESIDUES)
def test_labels_as_long_as_sequences_are_of_residues(take, capsys, case: str) -> None:
    labels, classes, *length = OF_RESIDUES[case]
    sequences = shortened(*length, SEQUENCES)[0] if length else SEQUENCES
    found, number = take(labels, sequences), sum(map(len, sequences))
    assert found.classes == classes and len(found.values) == number
    assert found.task is (Task.residue_classes if classes else Task.residue_numbers)
    assert f"rows are used, {number:,} of {number:,} residues" in capsys.readouterr().err


def test_attributes_of_long_headers_are_read_in_linear_time(read) -> None:
    found = read(f">A TARGET={' ' * 60_000}a SET=test \t{'x ' * 60_000}\nMKTA\n", "x.fasta")
    assert (found.examples[0].label, found.examples[0].split) == ("a", "test")


def test_names_of_columns_may_have_capitals_and_blanks(read) -> None:
    found = read("ID; Sequence ;Target;Set\nA;MKTA;1.5;train\n;;;\n\n", "x.csv").examples
    assert found == [Example("A", "MKTA", "1.5", "train")]
    for column, label in ((None, "2"), ("label", "2"), ("Label", "1")):
        found = read("ID,sequence,Label,label\nA,MKTA,1,2\n", form=Form(column=column)).examples
        assert found[0].label == label


def test_downloads_of_uniprot_have_their_own_columns(read, capsys) -> None:
    text = "Entry\tEntry Name\tGene Names\tLength\tSequence\nP1\tA_B\tid 7\t4\tMKTA\n"
    assert read(text, form=Form(column="Length")).examples == [Example("P1", "MKTA", "4")]
    shown = "identifiers from the column Entry, sequences from the column sequence, labels from the"
    assert f"labels.tsv: {shown} column Length" in capsys.readouterr().err
    found = read(text.replace("Entry\t", "Own\t", 1), form=Form(column="Length")).examples
    assert found[0].identifier == "A_B"


def test_targets() -> None:
    several = targets_of(["b;a", "c", "a; b"], Task.several_classes, min_count=2)
    assert several.classes == ["a", "b"]
    assert several.values.tolist() == [[True, True], [False, False], [True, True]]
    residues = targets_of(["H?E", "??H"], Task.residue_classes)
    assert residues.classes == ["E", "H"] and residues.values.tolist() == [1, 0, 1]
    assert residues.groups.tolist() == [0, 0, 1]
    assert [place.tolist() for place in residues.places] == [[0, 2], [2]]
    for labels, task, told in (
        (["1", "x"], Task.number, "'x' is not a number"),
        (["a", "a"], Task.one_class, "all labels are a"),
        (["a;b", "c"], Task.several_classes, "no class has 3 proteins"),
    ):
        with pytest.raises(UserError, match=told):
            targets_of(labels, task, min_count=3)


def test_classes_that_are_not_tested_are_named() -> None:
    rows = np.arange(4)
    one = targets_of(["a", "b", "c", "a"], Task.one_class)
    assert missing_in_test(one, rows) is None
    for tested, told in (
        (rows[:2], "lack 1 of 3 classes (c), which the metrics do not"),
        (rows[3:], "lack 2 of 3 classes (b, c), so there is nothing to tell apart"),
    ):
        assert told in (missing_in_test(one, tested) or "")
    several = targets_of(["a;b", "b", "a", "b"], Task.several_classes)
    assert "lack 1 of 2 classes (a)" in (missing_in_test(several, rows[[1, 3]]) or "")
    assert missing_in_test(targets_of(["1", "2.5"], Task.number), rows[:1]) is None


def test_whole_clusters_are_drawn() -> None:
    sequences = random_sequences(40)
    examples = [Example(str(n), one, "1", cluster=f"c{n // 4}") for n, one in enumerate(sequences)]
    split = split_of(examples, seed=1)
    assert len(split.test) == 8 and len(split.train) == 32 and not len(split.valid)
    assert not set(split.test // 4) & set(split.train // 4)
    assert split_of(examples, seed=1).test.tolist() == split.test.tolist()
    by_table = split_of(with_clusters(examples, {str(n): str(n % 2) for n in range(40)}), seed=1)
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
        assert cluster_names(with_clusters(examples, table)) == ["c", "c"]
    assert [one.cluster for one in with_clusters(examples, {"P1": "c"})] == ["c", ""]
    several = {"sp|P1|A": "c", "tr|P1|A": "d"}
    with pytest.raises(InputDataError, match=r"sp.P1.A and tr.P1.A have the accession of P1"):
        with_clusters(examples, several)
    assert with_clusters(examples, {**several, "P1": "e"})[0].cluster == "e"
    # Of equal sequences one with a cluster decides, also if the copy without one comes first.
    three = [Example("A", "MKTA", "1"), Example("B", "MKTA", "1"), Example("C", "MKTC", "1")]
    assert cluster_names(with_clusters(three, {"B": "c", "C": "c"})) == ["c", "c", "c"]
    assert cluster_names(with_clusters(three, {"C": "c"})) == ["only A", "only A", "c"]
    for refused, match in (
        (
            lambda: with_clusters(examples, {"Q1": "c"}),
            r"none of the 2 proteins.*identifiers like P1",
        ),
        (lambda: split_of(examples, seed=0), "neither splits nor clusters"),
        (
            lambda: split_of([Example("A", "MKTA", "1", "train")], seed=0),
            "no protein is in the split test",
        ),
    ):
        with pytest.raises(InputDataError, match=match):
            refused()


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
    found = leakage(examples, split_of(examples, seed=0))
    # C has the sequence of A, and is put into its cluster.
    assert (found.identical, found.same_cluster, found.similar) == (1, 2, 2)
    assert "of 4 test proteins, 1 have the sequence of one" in (found.describe(4) or "")
    clean = [examples[0], examples[-1]]
    assert leakage(clean, split_of(clean, seed=0)).describe(1) is None
