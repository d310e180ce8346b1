"""`protlm probe` and `predict`: files in and out, clusters, mistakes, and the page's commands."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import protlm
from protlm.checkpoints.checks import write_sums
from protlm.checkpoints.format import default_model
from protlm.commands.probe import predict, probe_labels
from protlm.downstream.linear import probabilities
from protlm.downstream.probe_results import PROBE, name_of_model, read_probe
from protlm.model.embedding import embeddings
from protlm.options.labels import LabelOptions, ProbeOptions, Task
from protlm.system.errors import InputDataError, UserError
from tests.fixtures.commands import ROOT, Command, read_table, run_page
from tests.fixtures.runs import Train

PAGE = ROOT / "docs" / "learn.md"
OPTIONS = ProbeOptions(layers=(0, 1))


# What is changed in the files of a probe, whose sums are right, and what the sentence says.
DAMAGED: list[tuple[dict[str, Any], str]] = [
    *(({"json": {"layer": layer}}, "its layer or its width") for layer in (99, -5)),
    *(({"json": {"layer": layer}}, "layer=.* must be a whole") for layer in ("x", None, 1e308)),
    ({"json": {"classes": ["a", "b", "c"]}}, "does not have 3 outputs"),
    ({"json": {"format": 99}}, "another format"),
    ({"array": lambda one: one[:5].copy()}, "its layer or its width"),
    ({"array": lambda one: one * np.nan}, "NaN or infinite"),
    ({"array": lambda one: one.astype(np.int64)}, "as torch.int64"),
]


@pytest.fixture
def labels(workplace: Path) -> Path:
    """The table of the page, and proteins.fasta with its sequences."""
    text = PAGE.read_text().split("```text\n")[1].split("```")[0]
    path = workplace / "labels.tsv"
    path.write_text(text)
    fasta = "".join(f">{row['identifier']}\n{row['sequence']}\n" for row in read_table(path))
    (workplace / "proteins.fasta").write_text(fasta)
    return path


@pytest.fixture
def run(labels: Path, protlm_in_process: Command) -> Any:
    """Runs a command, as it is typed beside the labels and the model `run`."""
    return lambda command: protlm_in_process(*command.split(), cwd=labels.parent)


def write_residues(path: Path, rows: list[dict[str, str]]) -> list[str]:
    """Writes labels of residues, which mark W, and returns them."""
    marked = [re.sub("[^W]", "-", row["sequence"]) for row in rows]
    pairs = zip(rows, marked, strict=True)
    lines = [f">{row['identifier']} SET={row['split']}\n{mark}\n" for row, mark in pairs]
    path.write_text("".join(lines))
    return marked


def test_a_probe_and_its_predictions(
    labels: Path, tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "probe"
    probe_labels(labels, tiny_run, folder, OPTIONS, LabelOptions())
    printed, said = capsys.readouterr()
    assert printed.endswith(f"{folder}\n")
    assert "class of 2 classes (membrane, nucleus); 6 of 6 rows are used; 50.0% are" in said
    assert "task: class of 2 classes; proteins: 4 train, 2 test" in printed
    assert "accuracy of the model minus that of" in printed and ", which includes 0" in printed
    assert "fewer than 10 test proteins of a class, or without it: metrics are uncertain" in printed
    assert "the split leaks: of 2 test" in printed
    results = json.loads((folder / "results.json").read_text())
    assert set(results["predictors"]) == {
        *("model", "random_weights", "composition", "three_mers", "length", "constant")
    }
    assert results["test_proteins_with_relatives_to_fit_to"]["similar"] == 1
    assert results["predictors"]["model"]["layer"] in (0, 1)
    probe, model = read_probe(str(folder)), protlm.load(tiny_run)
    rows = read_table(folder / "predictions.tsv")
    assert [row["identifier"] for row in rows] == ["P5", "P6"]
    predict(tmp_path / "proteins.fasta", folder, tiny_run, tmp_path / "all.csv")
    found = read_table(tmp_path / "all.csv")
    assert [row["identifier"] for row in found] == [f"P{n}" for n in range(1, 7)]
    sequences = [row["sequence"] for row in read_table(labels)]
    (states,) = embeddings(model, sequences, layers=[probe.layer], tokens_per_batch=999)
    expected = probabilities(probe.outputs(states, []), Task.one_class)
    shown = [[float(row[f"p({name})"]) for name in probe.classes] for row in found]
    assert np.array(shown) == pytest.approx(expected, abs=1e-3)
    named = [probe.classes[n] for n in expected.argmax(1)]
    assert [row["predicted"] for row in found] == named
    assert [row["predicted"] for row in rows] == named[4:]
    # The probe names its model, also when both are moved together.
    moved = shutil.copytree(folder, tmp_path / "moved" / "p")
    content = json.loads((moved / PROBE.description).read_text())
    assert (folder / content["model"]).samefile(tiny_run)
    with pytest.raises(UserError, match=r"other is not there"):
        (moved / PROBE.description).write_text(json.dumps({**content, "model": "../other"}))
        write_sums(moved)
        predict(tmp_path / "proteins.fasta", moved, None, tmp_path / "moved.csv")
    (moved / "../other").symlink_to(tiny_run)
    predict(tmp_path / "proteins.fasta", moved, None, tmp_path / "moved.csv")
    assert (tmp_path / "moved.csv").read_text() == (tmp_path / "all.csv").read_text()
    assert name_of_model(default_model(), folder) == "hybrid-6m"


def test_residues_have_a_row_each(labels: Path, tiny_run: Path, tmp_path: Path, run: Any) -> None:
    rows = read_table(labels)
    marked = write_residues(tmp_path / "residues.fasta", rows)
    reading = LabelOptions(sequences=tmp_path / "proteins.fasta")
    probe_labels(tmp_path / "residues.fasta", tiny_run, tmp_path / "p", OPTIONS, reading)
    tested = read_table(tmp_path / "p" / "predictions.tsv")
    assert "".join(row["label"] for row in tested) == "".join(marked[4:])
    done = run("predict proteins.fasta -p p -m run -o all.tsv")
    assert "6 records: 6 predicted, 0 skipped" in done.stderr
    found = read_table(tmp_path / "all.tsv")
    assert "".join(row["residue"] for row in found) == "".join(row["sequence"] for row in rows)
    right = [row["predicted"] == m for row, m in zip(found, "".join(marked), strict=True)]
    assert np.mean(right) > 0.95


@pytest.mark.slow
def test_folds_and_their_mean(labels: Path, tmp_path: Path, run: Any) -> None:
    rows = [one["sequence"] for one in read_table(labels)]
    more = enumerate([*rows, *(f"{one}A" for one in rows)])
    body = "".join(f"{one},{len(one) / 7},{n // 2 % 3}\n" for n, one in more)
    (tmp_path / "assay.csv").write_text(f"mutated_sequence,DMS_score,fold_random_5\n{body}")
    typed = "probe assay.csv --label DMS_score --fold fold_random_5 -m run -o p"
    done = run(f"{typed} --dry-run")
    assert "task: number; 12 of 12 rows are used; from " in done.stderr
    assert "proteins: 8 train, 4 test, in the first of 3 folds" in done.stdout
    assert not (tmp_path / "p").exists()
    done = run(f"{typed} --layers 1")
    assert "mean of 3 folds by" in done.stdout
    assert "warning: fold 2: the split leaks: of 4 test proteins, " in done.stdout
    mean = json.loads((tmp_path / "p" / "results.json").read_text())
    assert (mean["fold"], mean["folds"]) == ("fold_random_5", ["0", "1", "2"])
    tested, each = [], []
    for number in (1, 2, 3):
        fold = tmp_path / "p" / f"fold-{number}"
        tested += [row["identifier"] for row in read_table(fold / "predictions.tsv")]
        found = json.loads((fold / "results.json").read_text())["predictors"]
        each.append(found["composition"]["metrics"]["R2"]["value"])
        assert read_probe(fold).layer == 1
    assert sorted(tested) == sorted(f"line {n}" for n in range(2, 14))
    assert mean["predictors"]["composition"]["metrics"]["R2"]["value"] == pytest.approx(
        np.mean(each)
    )


@pytest.mark.slow
def test_files_of_splits_and_columns_of_classes(labels: Path, tmp_path: Path, run: Any) -> None:
    rows = read_table(labels)
    for split in ("train", "test", "other"):
        of = [one for one in rows if (one["split"] == "train") == (split == "train")]
        other = split == "other"
        cells = (
            f"{one['sequence']}{'A' * other},{int(other or 'W' in one['sequence'])},"
            f"{int(one['label'] == 'nucleus')}"
            for one in of
        )
        (tmp_path / f"{split}.csv").write_text("\n".join(["aa_seq,a,b", *cells]))
    done = run("probe train.csv test.csv CASP=other.csv --label-columns b a -m run -o p --layers 0")
    assert "train.csv and 2 more: task: multi-label of 2 classes (a, b); 8 of 8" in done.stderr
    assert "CASP, 2 proteins: AUROC of model" in done.stdout
    found = json.loads((tmp_path / "p" / "results.json").read_text())
    assert found["test_sets"] == {"CASP": 2, "test": 2} and found["proteins"]["test"] == 4
    assert {*found["predictors"]["model"]["by_test_set"]} == {"CASP", "test"}
    assert "a;b" in {row["label"] for row in read_table(tmp_path / "p" / "predictions.tsv")}


@pytest.mark.slow
def test_numbers_of_residues_are_learned_and_predicted(
    labels: Path, tmp_path: Path, run: Any
) -> None:
    lines, rows = [], read_table(labels)
    for row in [*rows[:-1], {**rows[-1], "split": "test2"}]:
        values = [f"{1.5 if letter == 'W' else 0.25}" for letter in row["sequence"]]
        mask = "0" + "1" * (len(values) - 1)
        head = f">{row['identifier']} SET={row['split']} TARGET={';'.join(values)} MASK={mask}"
        lines += [head, row["sequence"]]
    (tmp_path / "x.fasta").write_text("\n".join(lines))
    done = run("probe x.fasta -m run -o p --layers 0")
    assert "task: per-residue-number; 6 of 6 rows" in done.stderr
    assert "masked: 6 by MASK=" in done.stderr and ", constant undefined" in done.stdout
    found = json.loads((tmp_path / "p" / "results.json").read_text())
    assert found["predictors"]["model"]["metrics"]["R2"]["value"] > 0.9
    assert found["masked_residues"] == {"by MASK=": 6}
    tested = read_table(tmp_path / "p" / "predictions.tsv")
    assert {row["label"] for row in tested} == {"1.5", "0.25"} and tested[0]["position"] == "2"
    run("predict proteins.fasta -p p -m run -o all.tsv")
    predicted = read_table(tmp_path / "all.tsv")
    assert all((float(x["predicted"]) > 0.9) == (x["residue"] == "W") for x in predicted)
    # Convolutions are written and read, and give what they gave in the test.
    run("probe x.fasta -m run -o cnn --head cnn")
    assert json.loads((tmp_path / "cnn" / "results.json").read_text())["head"] == "cnn"
    run("predict proteins.fasta -p cnn -m run -o cnn.tsv")
    predicted = {(x["identifier"], x["position"]): x for x in read_table(tmp_path / "cnn.tsv")}
    for row in read_table(tmp_path / "cnn" / "predictions.tsv"):
        own = predicted[row["identifier"], row["position"]]
        assert float(own["predicted"]) == pytest.approx(float(row["predicted"]), abs=1e-4)
    arrays = load_file(tmp_path / "cnn" / PROBE.weights)
    save_file({**arrays, "2.bias": np.zeros(3, np.float32)}, tmp_path / "cnn" / PROBE.weights)
    write_sums(tmp_path / "cnn")
    with pytest.raises(InputDataError, match=r"cnn is not a probe.*size mismatch for 2\.bias"):
        read_probe(tmp_path / "cnn")


@pytest.mark.slow
def test_clusters_are_made_or_read(
    labels: Path, tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = read_table(labels)
    text = "".join(f"{r['identifier']}\t{r['sequence']}\t{n / 7}\n" for n, r in enumerate(rows))
    table = tmp_path / "numbers.tsv"
    table.write_text("id\tsequence\ttarget\n" + text)
    with pytest.raises(InputDataError, match="neither splits nor clusters"):
        probe_labels(table, tiny_run, tmp_path / "p", OPTIONS, LabelOptions())
    clustered = LabelOptions(cluster=lambda sequences: [len(one) % 4 for one in sequences])
    result = probe_labels(table, tiny_run, tmp_path / "p", OPTIONS, clustered)
    tested = {len(rows[n]["sequence"]) % 4 for n in result.labeled.split.test}
    assert tested.isdisjoint({len(rows[n]["sequence"]) % 4 for n in result.labeled.split.train})
    assert result.labeled.leakage.same_cluster == 0
    clusters = tmp_path / "clusters.tsv"
    clusters.write_text("".join(f"P1\tP{n}\n" for n in range(1, 4)))
    both = LabelOptions(cluster_table=clusters)
    capsys.readouterr()
    result = probe_labels(table, tiny_run, tmp_path / "q", OPTIONS, both)
    groups = result.labeled.split.groups
    assert (len(set(groups[:3])), len(set(groups))) == (1, 4)
    assert "clusters.tsv lacks 3 of 6 proteins" in capsys.readouterr().err
    for text, words in (
        ("X1\tX2\n", "has none of the 6 proteins"),
        ("P1 P2\n", "line 1: 'P1 P2' is not a representative"),
    ):
        clusters.write_text(text)
        with pytest.raises(InputDataError, match=words):
            probe_labels(table, tiny_run, tmp_path / "r", OPTIONS, both)


def test_another_model_and_damaged_probes_are_refused(
    labels: Path, tiny_run: Path, train_tiny: Train, tmp_path: Path
) -> None:
    probe_labels(labels, tiny_run, tmp_path / "p", OPTIONS, LabelOptions())
    fasta = tmp_path / "proteins.fasta"
    other = train_tiny(tmp_path / "other", "trainer.max_steps=2", "seed=3")
    for model, output, words in (
        (other, "x.tsv", "was fitted on a model with other weights"),
        (tiny_run, "x.h5", r"x\.\w+: the output is a table"),
    ):
        with pytest.raises(UserError, match=words):
            predict(fasta, tmp_path / "p", model, tmp_path / output)
    for number, (changes, words) in enumerate(DAMAGED):
        folder = shutil.copytree(tmp_path / "p", tmp_path / str(number))
        content = json.loads((folder / PROBE.description).read_text())
        (folder / PROBE.description).write_text(json.dumps({**content, **changes.get("json", {})}))
        arrays = load_file(folder / PROBE.weights)
        save_file(
            {n: changes.get("array", lambda one: one)(arrays[n]) for n in arrays},
            folder / PROBE.weights,
        )
        write_sums(folder)
        with pytest.raises(InputDataError, match=words):
            predict(fasta, folder, tiny_run, tmp_path / "x.tsv")
    assert not (tmp_path / "x.tsv").exists()


@pytest.mark.slow
def test_the_commands_of_the_page_run(labels: Path, protlm_in_process: Command) -> None:
    folder, rows = labels.parent, read_table(labels)
    numbers = "".join(f"{row['sequence']},{n / 7}\n" for n, row in enumerate(rows))
    (folder / "stability.csv").write_text(f"sequence,target\n{numbers}")
    members = "".join(f"line {2 * (n // 2) + 2}\tline {n + 2}\n" for n in range(6))
    (folder / "clusters.tsv").write_text(members)
    terms = "".join(f"{r['identifier']}\t1;{2 + n % 2}\t{r['split']}\n" for n, r in enumerate(rows))
    (folder / "terms.tsv").write_text(f"accession\tgo\tsplit\n{terms}")
    write_residues(folder / "residues.fasta", rows)
    run_page("learn.md", folder, protlm_in_process, fewest=5)
