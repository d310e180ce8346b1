"""Files in the form of benchmarks, and the published ones, with the numbers of the page."""

import gzip
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from protlm.cli.main import main
from protlm.downstream.examples import targets_from
from protlm.downstream.label_files import Example, named_files
from protlm.downstream.labels import read_labeled_proteins
from protlm.downstream.splits import folds_of, split_of
from protlm.downstream.tasks import targets_of
from protlm.options.labels import Form, LabelOptions, Task
from protlm.system.errors import InputDataError, UserError
from tests.fixtures.commands import ended, run_here

DATA = Path(os.environ.get("PROTLM_DATA", "/missing")) / "benchmarks"
# What is typed, and the numbers of proteins, residues, masked residues and rows that are left out.
PUBLISHED_FILES = Path(__file__).with_name("published_files.tsv").read_text().splitlines()[1:]

BIOTRAINER = (
    ">A TARGET=DVCDVVDD SET=train MASK=01101101\nSEQWENCE\n"
    ">B TARGET=DDDDDD SET=val MASK=111111\nPRTEIN\n"
    ">C TARGET=DDDDEEEDDD SET=test MASK=1111111110\nSEQVENCEPR\n"
    ">D TARGET=DDDEEEFFEE SET=test2\nQQQVVVCEPR\n>E TARGET=DDDD SET=pred\nPRTE\n"
    ">F TARGET=HHH SET=test MASK=000\nMKT\n"
)


def test_masks_test_sets_and_pred_of_biotrainer(read) -> None:
    found = read(BIOTRAINER, "x.fasta")
    assert found.per_residue
    assert [one.label for one in found.examples[:3]] == ["?VC?VV?D", "DDDDDD", "DDDDEEEDD?"]
    assert found.masked == {"by MASK=": 7}
    assert found.left_out == {"in the set pred": 1, "without a label": 1}
    split = split_of(found.examples, seed=0)
    assert {name: rows.tolist() for name, rows in split.test_sets.items()} == {
        "test": [2],
        "test2": [3],
    }
    assert split.test.tolist() == [2, 3] and split.valid.tolist() == [1]
    with pytest.raises(InputDataError, match="line 1: MASK= lacks a 0 or 1 for each"):
        read(BIOTRAINER.replace("01101101", "0110110"), "x.fasta")
    form = Form(test_sets=("CASP12",))
    found = read(BIOTRAINER.replace("test2", "CASP12"), "x.fasta", form=form)
    assert {*split_of(found.examples, seed=0).test_sets} == {"test", "CASP12"}
    with pytest.raises(UserError, match=r"has no row with the split CASP12, a test set"):
        read(BIOTRAINER, "x.fasta", form=form)


def test_numbers_of_residues_and_unknown_ones(read) -> None:
    text = (
        ">A SET=train TARGET=999.0;0.5;-1;2 MASK=0111\nMKTA\n"
        ">B SET=test TARGET=1;999;nan;4;5 MASK=11110\nMKTAA\n>C SET=val TARGET=7.25;8\nMK\n"
    )
    found = read(text, "x.fasta")
    assert [one.label for one in found.examples] == ["?;0.5;-1;2", "1;?;?;4;?", "7.25;8"]
    assert found.masked == {"by MASK=": 2, "that are 999, which is unknown": 1}
    targets = targets_of([one.label for one in found.examples], Task.residue_numbers)
    assert targets.values.tolist() == [0.5, -1, 2, 1, 4, 7.25, 8]
    assert targets.groups.tolist() == [0, 0, 0, 1, 1, 2, 2] and not targets.classes
    assert targets.places is not None and targets.places[1].tolist() == [0, 3]
    digits = targets_of(["12?", "3"], Task.residue_numbers)
    assert digits.values.tolist() == [1, 2, 3]
    with pytest.raises(InputDataError, match=r"'H' is not a number; .* are classes"):
        targets_of(["12H"], Task.residue_numbers)


def test_columns_of_netsurfp(read) -> None:
    text = (
        "input,dssp3,dssp8,disorder,cb513_mask\n"
        "MKTA,HHEC,HHBS,0.0 1.0 1.0 1.0,1.0 1.0 1.0 0.0\n"
        'MKTAW,HHECC,HHBSS,"[1.0, 0.0, 1.0, 1.0, 1.0]",1.0 0.0 1.0 1.0 1.0\n'
        "MKT,HHE,HHB,1.0 1.0 1.0,1.0 1.0 1.0\n"
    )
    with pytest.raises(InputDataError, match=r"dssp8, disorder, cb513_mask, not label$"):
        read(text, "x.csv")
    found = read(text, "x.csv", form=Form(column="dssp3"))
    assert [one.label for one in found.examples] == ["?HE?", "H?ECC", "HHE"]
    assert found.masked == {"by disorder": 1, "by cb513_mask": 2} and found.per_residue
    found = read(text, "x.csv", form=Form(column="disorder"))
    assert [one.label for one in found.examples] == ["011?", "1?111", "111"]


@pytest.mark.parametrize("mask", ["mask.fasta", "mask.fasta.gz"])
def test_masks_beside_labels_are_applied(read, tmp_path: Path, mask: str) -> None:
    (tmp_path / "sequences.fasta").write_text(">A\nMKTA\n>B\nMKT\n")
    text = ">A\n0111\n>B\n110\n"
    data = gzip.compress(text.encode()) if mask.endswith("gz") else text.encode()
    (tmp_path / mask).write_bytes(data)
    labels, sequences = ">A SET=train\nHHEE\n>B SET=test\nHEE\n", tmp_path / "sequences.fasta"
    found = read(labels, "x.fasta", sequences=sequences)
    assert [one.label for one in found.examples] == ["?HEE", "HE?"]
    assert found.masked == {f"by {mask}": 2}
    assert read(">A TARGET=1 SET=train\nMKTA\n", "x.fasta").masked == {}
    (tmp_path / mask).write_bytes(data[:0] or b">A\n0111\n")
    with pytest.raises(InputDataError, match=f"{mask} has no mask of B; add it, or move"):
        read(labels, "x.fasta", sequences=sequences)


def test_repeated_proteins_are_counted_and_leave_what_is_fitted_to(read, capsys) -> None:
    head, row = "id\tseq\tlabel\tset\n", "{}\tMKTA\t{}\t{}\n"
    rows = [("A", 1, "train"), ("A", 1, "train"), ("B", 2, "test"), ("B", 2, "val")]
    rows += [("C", 3, "train"), ("C", 3, "test"), ("C", 3, "train"), ("D", 4, "train")]
    found = read(head + "".join(row.format(*one) for one in rows))
    kept = [("A", "train"), ("B", "test"), ("C", "test"), ("D", "train")]
    assert [(one.identifier, one.split) for one in found.examples] == kept
    assert found.left_out == {"identical to an earlier one": 1, "that the test has too": 3}
    assert found.in_both == ["B", "C"]
    targets_from(Path("x"), found, LabelOptions(task=Task.number))
    said = capsys.readouterr().err
    assert "2 in train or valid stay in the test only: B, C" in said
    assert "labels from the column label, splits from the column set\n" in said
    # Without identifiers, by the sequences.
    rows = "".join(f"MK{end}\t{n}\t{split}\n" for end, n, split in rows)
    found = read("seq\tlabel\tset\n" + rows)
    assert [(one.sequence, one.split) for one in found.examples] == [
        (f"MK{end}", split) for end, split in kept
    ]
    assert found.left_out == {"identical to an earlier one": 1, "that the test has too": 3}
    with pytest.raises(
        InputDataError, match="3: A is repeated, with another label, sequence or fold"
    ):
        read(head + row.format("A", 1, "test") + row.format("A", 2, "test"))


def test_headers_of_deeploc(read, capsys) -> None:
    text = ">A Cytoplasm-Nucleus-U new_test_set \nMKTA\n>B Cell.membrane-M\nMKTC\n"
    for header, labels in (
        ("header", ["Cytoplasm-Nucleus-U", "Cell.membrane-M"]),
        ("location", ["Cytoplasm-Nucleus", "Cell.membrane"]),
    ):
        form = Form(header=header)
        found = read(text, "x.fasta", form=form)
        assert [one.label for one in found.examples] == labels
        assert [one.split for one in found.examples] == ["test", "train"]
        targets_from(Path("x"), found, LabelOptions(task=Task.one_class, form=form))
        said = capsys.readouterr().err
        assert ("at the end are kept (labels read as location lack" in said) == (header == "header")


def test_columns_of_classes_and_folds_of_deeploc_2(read) -> None:
    text = (
        ",ACC,Kingdom,Partition,Membrane,Cytoplasm,Golgi apparatus,Sequence\n"
        "0,A,Metazoa,0.0,1.0,1,0,MKTA\n1,B,Metazoa,1.0,0.0,0,1,MKTC\n2,C,Fungi,,0.0,1,0,MKTD\n"
        "3,D,Fungi,1.0,0,0,0,MKTD\n"
    )
    form = Form(columns=("Cytoplasm", "Golgi apparatus", "Membrane"), fold="Partition")
    found = read(text, "x.csv", form=form)
    labels = [one.label for one in found.examples]
    assert labels == ["Cytoplasm;Membrane", "Golgi apparatus", ";"]
    assert found.left_out == {"without a fold": 1}
    folds = folds_of(found.examples, seed=0)
    assert {name: (x.train.tolist(), x.test.tolist()) for name, x in folds.items()} == {
        "0.0": ([1, 2], [0]),
        "1.0": ([0], [1, 2]),
    }
    # A protein of none of the classes is an example without them, as in the set of HPA.
    assert targets_of(labels, Task.several_classes).values.any(axis=1).tolist() == [1, 1, 0]
    found = read(",sid,fasta,x\n0,A,MKTA,False\n1,B,MKTC,1\n", form=Form(columns=("x",)))
    known = [("A", "MKTA", ";"), ("B", "MKTC", "x")]
    assert [(one.identifier, one.sequence, one.label) for one in found.examples] == known
    for column, words in (
        ("Nucleus", "has the columns .*, not Nucleus$"),
        ("Kingdom", "line 2: Kingdom, .* is 'Metazoa', not 0"),
    ):
        with pytest.raises(InputDataError, match=words):
            read(text, "x.csv", form=Form(columns=(column,)))
    with pytest.raises(InputDataError, match="all proteins are in the fold 1; give two"):
        folds_of([Example("A", "MK", "1", fold="1")], seed=0)


def test_annotations_of_deepfri(read, tmp_path: Path) -> None:
    text = (
        "### GO-terms (molecular_function)\nGO:1\tGO:2\n### GO-names (molecular_function)\n"
        '"a\tb\n### PDB-chain\tGO-terms (molecular_function)\n1A-B\tGO:1,GO:2\n2C-D\t\n3E-F\tGO:2\n'
    )
    (tmp_path / "x.fasta").write_text(">1A-B nrPDB\nMKTA\n>2C-D nrPDB\nMKTC\n>3E-F\nMKTD\n")
    (tmp_path / "train.txt").write_text("1A-B\n2C-D\n")
    (tmp_path / "test.csv").write_text("PDB-chain,<30%\n3E-F,1\n")
    splits = tuple(
        (one, tmp_path / f"{one}.{end}") for one, end in (("train", "txt"), ("test", "csv"))
    )
    form = Form("GO-terms (molecular_function)", splits=splits)
    sequences = tmp_path / "x.fasta"
    found = read(text, sequences=sequences, form=form)
    parts = [(one.identifier, one.label, one.split) for one in found.examples]
    assert parts == [("1A-B", "GO:1,GO:2", "train"), ("3E-F", "GO:2", "test")]
    assert found.left_out == {"without a label": 1} and found.examples[0].place.endswith("line 6")
    form = replace(form, splits=(*splits, ("valid", sequences)))
    with pytest.raises(InputDataError, match=r"x.fasta has no identifier of a protein with a"):
        read(text, sequences=sequences, form=form)


def test_files_are_splits(read, tmp_path: Path) -> None:
    (tmp_path / "test.csv").write_text("aa_seq,label\nMKTC,2.5\n")
    (tmp_path / "casp.csv").write_text("primary,label\nMKTD,2.5\n")
    files = [f"{tmp_path}/train.csv.gz", f"{tmp_path}/test.csv", f"CASP12={tmp_path}/casp.csv"]
    (split, path), *others = named_files(files, several=True)
    read("seq_full,label\nMKTA,1.5\n", path.name, form=Form(split=split))
    found = read_labeled_proteins(path, form=Form(split=split, others=tuple(others)))
    parts = [(one.identifier, one.split) for one in found.examples]
    names = ["train.csv.gz line 2", "test.csv line 2", "casp.csv line 2"]
    assert parts == list(zip(names, ["train", "test", "CASP12"], strict=True))
    (tmp_path / "casp.csv").write_text("primary,label,set\nMKTD,2.5,train\n")
    with pytest.raises(InputDataError, match=r"line 2: the split is train, .* given as CASP12"):
        read_labeled_proteins(path, form=Form(split=split, others=tuple(others)))
    with pytest.raises(UserError, match=r"casp.csv is not named by its split; type train="):
        named_files([f"{tmp_path}/casp.csv"], several=True)
    assert named_files([f"{tmp_path}/casp.csv"], several=False) == [("", tmp_path / "casp.csv")]


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="the folder of PROTLM_DATA has no benchmarks")
@pytest.mark.parametrize("row", PUBLISHED_FILES)
def test_a_published_file_has_its_known_numbers(row: str, tmp_path: Path) -> None:
    typed, proteins, residues, masked, left_out = row.split("\t")
    words = [
        re.sub(
            r"(?<![\w/])(bind|bt|conservation|gb1|pbc|secondary_structure)/", f"{DATA}/\\1/", one
        )
        for one in shlex.split(typed)
    ]
    done = run_here(main, [*words, "-o", "probe", "--dry-run"], tmp_path)
    ended(done, 3 if "neither splits nor" in done.stderr else 0)
    (line,) = [one for one in done.stderr.splitlines() if "rows are used" in one]
    assert f"; {proteins} of " in line
    assert not residues or f"are used, {residues} of " in line

    def total(name: str) -> int:
        part = re.search(rf"; {name}: ([^;]*)", line)
        counts = re.findall(r"(?:^|, )([\d,]*\d)(?= )", part[1] if part else "")
        return sum(int(one.replace(",", "")) for one in counts)

    assert total("masked") == int(masked.replace(",", "") or 0)
    assert total("left out") == int(left_out.replace(",", "") or 0)
    assert not (tmp_path / "probe").exists()
