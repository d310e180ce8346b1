"""`protlm benchmark`: published folders in, one table out; and the recipes of other harnesses."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import protlm
from protlm.analysis.bootstrap import Metrics, draws
from protlm.commands import benchmark as command
from protlm.commands.benchmark import benchmark
from protlm.commands.probe import probe_labels
from protlm.downstream import benchmarks, metrics
from protlm.downstream.benchmarks import average, figure_of, find, rows_of
from protlm.downstream.metrics import averages
from protlm.downstream.variants import Assay
from protlm.evaluation.contacts import Contacts
from protlm.model import embedding
from protlm.options.labels import BenchmarkOptions, LabelOptions, ProbeOptions
from protlm.plots import benchmark_figure
from protlm.system.errors import UserError
from protlm.system.paths import sha256_of
from protlm.system.work_folder import work_folder
from tests.fixtures.commands import Command, read_table, run_page
from tests.fixtures.runs import Killed
from tests.small_models import structure_folder

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmark.md"
KINDS = ("residue", "sequence")
WILD_TYPE = "MKTAYIAKQRQISFVKSHFSRQ"
FOLDS = "fold_random_5,fold_modulo_5,fold_contiguous_5"
RNG = np.random.default_rng(0)
LETTERS = list("ACDEFGHIKLMNPQRSTVWY")
PROTEINS = ["".join(RNG.choice(LETTERS, 8 + row % 5)) for row in range(18)]
SETS = ("train", "train", "test") * 6


def write(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, ""]))


def fasta(path: Path, heads: list[str], texts: list[str]) -> None:
    write(path, *(f">{head}\n{text}" for head, text in zip(heads, texts, strict=True)))


def results(folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    """The rows of a table by task and predictor."""
    return {(row["task"], row["by"]): row for row in read_table(folder / "results.tsv")}


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws few resamples, which take most of the time; intervals have tests of their own."""
    functions: list[Any] = [draws, metrics.label_scores]
    for function, name in zip(functions, ("number", "resamples"), strict=True):
        monkeypatch.setitem(function.__kwdefaults__, name, 20)
    for name in ("RESAMPLES", "_FEWEST", "_BLOCKS"):
        monkeypatch.setattr(metrics, name, 20)
    monkeypatch.setattr(benchmarks, "RESAMPLES", 20)


@pytest.fixture
def flip(workplace: Path) -> Path:
    """Three of FLIP's splits, of few proteins, in the layout of its repository."""
    folder = workplace / "flip"
    rows = [f"{x},{x.count('A') + n / 9},{SETS[n]}," for n, x in enumerate(PROTEINS)]
    for split in ("one_vs_rest", "sampled"):
        path = folder / "gb1" / "splits" / f"{split}.csv"
        write(path, "sequence,target,set,validation", *rows[: len(split) + 7])
    splits, names = folder / "secondary_structure" / "splits", [f"P{n}" for n in range(18)]
    states = ["".join("H" if x in "ALMKE" else "C" for x in one) for one in PROTEINS]
    heads = [f"{name} SET={split}" for name, split in zip(names, SETS, strict=True)]
    fasta(splits / "sampled.fasta", heads, states)
    fasta(splits / "sequences.fasta", names, PROTEINS)
    fasta(splits / "mask.fasta", names, ["0" + "1" * (len(one) - 1) for one in PROTEINS])
    for name in ("notes.txt", ".DS_Store"):
        write(folder / "gb1" / name)
    return folder


@pytest.fixture
def gym(workplace: Path) -> Path:
    """Assays of two proteins, insertions and deletions, clinical variants, and folds."""
    folder, rng = workplace / "gym", np.random.default_rng(1)
    tables = {name: folder / f"DMS_ProteinGym_{name}" for name in ("substitutions", "indels")}
    places = [(place, x) for place in range(8) for x in "AW" if x != WILD_TYPE[place]]
    for name in ("A_1", "A_2", "B_1"):
        rows = [f"{WILD_TYPE[n]}{n + 1}{x},{rng.normal():.3f}" for n, x in places]
        write(tables["substitutions"] / f"{name}.csv", "mutant,DMS_score", *rows)
    path = folder / "cv_folds_singles_substitutions" / "A_1.csv"
    rows = [f"{WILD_TYPE[:n]}{x}{WILD_TYPE[n + 1 :]},{n % 7}" for n, x in places]
    rows = [row + f",{n % 3}" * 3 for n, row in enumerate(rows)]
    write(path, f"mutated_sequence,DMS_score,{FOLDS}", *rows)
    rows = [f"{WILD_TYPE[:n] + WILD_TYPE[n + 1 :]},{n}" for n in range(3)]
    write(tables["indels"] / "D_1.csv", "mutated_sequence,DMS_score", *rows)
    rows = [f"{WILD_TYPE[n]}{n + 1}W,{('Benign', 'Pathogenic')[n % 2]}" for n in range(6)]
    path = folder / "clinical_ProteinGym_substitutions" / "NP_1.3.csv"
    write(path, "mutant,DMS_bin_score", *rows)
    for name, assays in (
        ("DMS_substitutions", "A_1 A_2 B_1 C_1"),
        ("DMS_indels", "D_1"),
        ("clinical_substitutions", "NP_1.3"),
    ):
        rows = [f"{one},{one[0]},{WILD_TYPE},{one[0]}" for one in assays.split()]
        columns = "DMS_id,UniProt_ID,target_seq,coarse_selection_type"
        write(folder / "reference_files" / f"{name}.csv", columns, *rows)
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws")
def test_flip_is_run_as_it_is_published(
    flip: Path, tiny_run: Path, workplace: Path, protlm_in_process: Command, monkeypatch
) -> None:
    """And has the figures of `protlm probe`."""
    monkeypatch.setattr(command, "IN_MEMORY", 10)
    typed = ["benchmark", "flip", flip, "-m", "run", "-o", "out"]
    done = protlm_in_process(*typed, "--dry-run", cwd=workplace)
    assert not (workplace / "out").exists(), done.stderr
    assert "run: 68.0 kB of temporary files in " in done.stdout
    assert re.search(r"secondary_structure +run +18 +177 +\d+ ", done.stdout)
    assert "18 of 18 rows are used, 159 of 177 residues; " in done.stderr
    assert "; masked: 18 by mask.fasta" in done.stderr
    done = protlm_in_process(*typed, cwd=workplace)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "missing: 26 (aav/des_mut, " in done.stdout
    assert "not known: 1 (gb1/notes.txt)" in done.stdout
    assert not (workplace / "out.partial").exists()
    assert "predictors" in done.stderr
    found = json.loads((workplace / "out/results.json").read_text())
    rows, splits = results(workplace / "out"), flip / "secondary_structure" / "splits"
    assert len(found["missing"]) == 26 and (workplace / "out/results.png").exists()
    assert found["the files"] == {name: sha256_of(flip / name) for name in found["the files"]}
    for task, path, reading in (
        ("gb1/one_vs_rest", flip / "gb1/splits/one_vs_rest.csv", LabelOptions()),
        ("secondary_structure", splits / "sampled.fasta", LabelOptions(splits / "sequences.fasta")),
    ):
        probe_labels(path, tiny_run, workplace / task, ProbeOptions(), reading)
        own = json.loads((workplace / task / "results.json").read_text())
        assert found["tasks"]["run"][task]["masked_residues"] == own["masked_residues"]
        shown = {by: x for (name, by), x in rows.items() if name == task and not x["source"]}
        assert len(shown) == len(own["predictors"]) + 1
        for who, one in own["predictors"].items():
            row = shown["run" if who == "model" else who]
            assert int(row["proteins"]) == own["proteins"]["test"] == 6
            for key, x in one["metrics"][row["metric"]].items():
                assert float(row[key] or 9) == pytest.approx(9 if x is None else x, abs=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws")
def test_what_was_killed_continues_to_the_same_bytes(
    flip: Path, causal_run: Path, workplace: Path, monkeypatch, capsys, look_at
) -> None:
    """Each of two models embeds the proteins of two splits once."""
    embedded: list[str] = []
    labels = command._RUN["labels"]
    look_at(
        *(embedding, "embed_all"),
        lambda _, texts, *rest, **__: embedded.extend(texts if rest[1] is None else []),
    )
    (workplace / "other").symlink_to(causal_run)

    def run(output: str, **probe: int) -> None:
        options = BenchmarkOptions(probe=ProbeOptions(**probe))
        models = [workplace / "run", workplace / "other"]
        benchmark("flip", flip, models, workplace / output, options)

    run("whole")
    # Also by their random weights.
    assert len(embedded) == 4 * len(PROTEINS)
    for last in (2, 1, 1):
        left = [0] * last

        def killed(*given: Any, left: list[int] = left) -> Any:
            found = labels(*given)
            if not left:
                raise Killed
            left.pop()
            return found

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setitem(command._RUN, "labels", killed)
            run("parts")
    with pytest.raises(UserError, match="was begun with --seed 0, not 1: use the same"):
        run("parts", seed=1)
    run("parts")
    assert capsys.readouterr().err.count("gb1/one_vs_rest: finished before\n") == 4
    for name in ("results.json", "results.tsv", "results.png"):
        whole, parts = ((workplace / x / name).read_bytes() for x in ("whole", "parts"))
        assert whole == parts
    by = [by for _, by in results(workplace / "parts")]
    assert {"other", "random_weights of run", "random_weights of other"} <= {*by}
    assert by.count("three_mers") == 2


@pytest.mark.parametrize("lost", ["vectors", "both vectors", "results", "flipped"])
def test_lost_parts_are_computed_as_they_were(
    lost: str, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Vectors are computed in the same batches: those of another task differ by rounding."""
    model, made = protlm.load(tiny_run), list[list[str]]()
    sequences = {"one": ["A", "C"], "two": ["C", "D", "E"], "three": ["E", "F", "A"]}

    def compute(some: list[str]) -> list[np.ndarray]:
        made.append(some)
        return [np.full((len(some), 4), len(some), np.float32)]

    def fake(task: Any, model: Any, options: Any, store: Any) -> dict[str, Any]:
        (found,) = store.means("model", sequences[task.name], compute)
        return {"figures": {"": found.tolist()}, "task": task.name}

    monkeypatch.setitem(command._RUN, "labels", fake)

    def run(folder: Path, *tasks: str) -> list[dict[str, Any]]:
        with work_folder(folder, {}, command._KIND) as work:
            named = [SimpleNamespace(name=one, kind="labels") for one in tasks]
            return [command._content(one, model, ProbeOptions(), work) for one in named]  # type: ignore[arg-type]

    whole = run(tmp_path / "whole", *sequences)
    assert made == [["A", "C"], ["D", "E"], ["F"]]
    run(tmp_path / "work", "one", "two")
    vectors = sorted((tmp_path / "work").glob("*.npy"))
    results = (tmp_path / "work").glob("????????????????*.json")
    damaged = {"vectors": vectors[:1], "both vectors": vectors, "flipped": vectors[1:]}
    for path in damaged.get(lost, results):
        content = path.read_bytes()
        path.unlink()
        if lost == "flipped":
            path.write_bytes(content[:200] + b"?" + content[201:])
    capsys.readouterr()
    assert run(tmp_path / "work", *sequences) == whole
    names = [{one.name for one in (tmp_path / x).glob("*.npy")} for x in ("whole", "work")]
    assert names[0] == names[1]
    told = capsys.readouterr().err
    assert ("is damaged" in told) == (lost == "flipped")
    assert told.count("finished before") == (lost in ("vectors", "flipped"))


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws")
def test_proteingym_is_averaged_as_it_defines(
    gym: Path, tiny_run: Path, workplace: Path, protlm_in_process: Command
) -> None:
    typed = ["benchmark", "proteingym", gym, "-m", "run", "-o", "out"]
    done = protlm_in_process(*typed, "--dry-run", cwd=workplace)
    assert "substitutions/A_1" in done.stdout, done.stderr
    done = protlm_in_process(*typed, cwd=workplace)
    assert "A_1" not in done.stdout, done.stderr
    assert "1 of 4 tables of substitutions" in done.stdout
    rows = results(workplace / "out")
    names = ("A_1", "A_2", "B_1")
    assays = {name: Assay(WILD_TYPE, name[0], name[0]) for name in names}
    for by in ("run", "random_weights", "composition"):
        each = {name: float(rows[f"substitutions/{name}", by]["value"]) for name in names}
        mean = averages(each, assays)["mean of types"]
        assert float(rows["substitutions", by]["value"]) == pytest.approx(mean)
    given = read_table(gym / "DMS_ProteinGym_substitutions" / "A_1.csv")
    scores = protlm.load(tiny_run).score(WILD_TYPE, [row["mutant"] for row in given])
    ranks = [np.argsort(np.argsort(x)) for x in (scores, [float(x["DMS_score"]) for x in given])]
    value = float(rows["substitutions/A_1", "run"]["value"])
    assert value == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert rows["clinical_substitutions", "run"]["metric"] == "AUC"
    # A table is missing, so that the average is not that of the published figures.
    assert ("substitutions", "ESM2 (8M)") not in rows
    assert rows["clinical_substitutions", "ESM-1b"]["value"] == "0.892"
    assert rows["fold_random_5", "three_mers"]["metric"] == "Spearman"
    found = json.loads((workplace / "out/results.json").read_text())
    assert found["tasks"]["run"]["indels/D_1"]["estimator"] == "pseudo-log-likelihood"
    assert found["missing"]["1 of 4 tables of substitutions"] == ["C_1"]
    typed[-1] = "one"
    asked = ["substitutions/A_1", "indels"]
    done = protlm_in_process(*typed, "--tasks", *asked, cwd=workplace)
    assert " A_1 " in done.stdout, done.stderr
    # The average of one assay, too.
    assert " D_1 " in done.stdout
    assert {x.partition("/")[0] for x, _ in results(workplace / "one")} == {
        "substitutions",
        "indels",
    }


def test_averages_draw_proteins_in_pairs() -> None:
    drawn = np.random.default_rng(0).normal(size=400)

    def figure(value: float) -> dict[str, Any]:
        scores = {"model": value + 0.1, "random_weights": value}
        metrics = {who: Metrics({"AUC": x}, np.full((3, 1), x)) for who, x in scores.items()}
        return figure_of(metrics, "AUC", 1)

    figures = {f"A{n}": figure(float(value)) for n, value in enumerate(drawn)}
    found = average(figures, {name: Assay("M", name, "") for name in figures}, seed=0)
    one, less = (found["by"][who] for who in ("random_weights", "model - random_weights"))
    assert found["proteins"] == 400 and one["value"] == pytest.approx(drawn.mean())
    assert one["high"] - one["low"] == pytest.approx(2 * 1.96 * drawn.std() / 20, rel=0.1)
    assert [less[key] for key in ("value", "low", "high")] == pytest.approx([0.1] * 3)
    # A gene of one class is in no average; one protein has no interval.
    few = {"A0": figures["A0"], "B": figure(np.nan)}
    assert average(few, {name: Assay("M", name, "") for name in few}, seed=0)["proteins"] == 1
    found = average({"A0": figures["A0"]}, {"A0": Assay("M", "A0", "")}, seed=0)
    assert found["by"]["random_weights"]["low"] is None


@pytest.mark.slow
def test_contacts_are_those_of_the_evaluation(tiny_run: Path, tmp_path: Path, capsys) -> None:
    folder = Path(structure_folder(tmp_path, "test", 4)).rename(tmp_path / "CASP14")
    benchmark("contacts", folder, [tiny_run], tmp_path / "out", BenchmarkOptions())
    assert "CASP14: 4 structures; too long: no structure" in capsys.readouterr().err
    rows = results(tmp_path / "out")
    made = Contacts(structures=str(folder), fit_structures="sample")
    values = made.run(protlm.load(tiny_run), None)
    found = {by: float(row["value"]) for (_, by), row in rows.items() if not row["source"]}
    for by, who in ((tiny_run.name, "model"), ("nearest_in_sequence", "nearest_in_sequence")):
        assert found[by] == pytest.approx(values[who]["long"]["P@L"]["mean"])
    # The best baseline has a row.
    ((model, best),) = (by.split(" - ") for by in found if " - " in by)
    assert found[f"{model} - {best}"] == pytest.approx(found[model] - found[best])
    assert rows["CASP14", "ESM-2 (8M)"]["value"] == "0.098"


def test_several_test_sets_are_rows_of_their_own(tiny_run: Path, tmp_path: Path) -> None:
    names = ["train", "val", "casp12", "casp13", "casp14", "newPISCES364"] * 3
    each = enumerate(zip(PROTEINS, names, strict=True))
    heads = [f"P{n} TARGET={('HC' * 9)[: len(one)]} SET={name}" for n, (one, name) in each]
    fasta(tmp_path / "supervised/secondary_structure.fasta", heads, PROTEINS)
    benchmark("pbc", tmp_path / "supervised", [tiny_run], tmp_path / "out", BenchmarkOptions())
    rows = results(tmp_path / "out")
    assert {(task, row["proteins"]) for (task, _), row in rows.items() if not row["source"]} == {
        (f"secondary_structure/{name}", "3") for name in names[2:6]
    }
    assert rows["secondary_structure/casp12", "ProtBert"]["value"] == "0.75"


@pytest.mark.slow
def test_relatives_of_casp_are_not_fitted_to(tiny_run: Path, tmp_path: Path) -> None:
    """Nor are proteins of CASP itself, which has no identifiers."""
    proteins = ["".join(RNG.choice(LETTERS, 40)) for _ in range(12)]
    names, splits = [f"P{n}" for n in range(12)], tmp_path / "secondary_structure" / "splits"
    heads = [f"{name} SET={'train' if n < 10 else 'test'}" for n, name in enumerate(names)]
    fasta(splits / "sampled.fasta", heads, ["HEC" * 13 + "H"] * 12)
    fasta(splits / "sequences.fasta", names, proteins)
    texts = ["".join(RNG.choice(LETTERS, 30)), proteins[0], "W" * 20 + proteins[1][:20]]
    for n, text in enumerate(texts):
        row = f"{text},{('HHEC' * 10)[: len(text)]},{' '.join('1' * len(text))}"
        write(tmp_path / f"CASP{12 + n}.csv", "input,dssp3,disorder", row)
    options = BenchmarkOptions(tasks=("casp",))
    benchmark("pbc", tmp_path, [tiny_run], tmp_path / "out", options)
    found = json.loads((tmp_path / "out/results.json").read_text())
    found = found["tasks"][tiny_run.name]["casp"]
    assert found["in_train_or_valid_and_test"] == ["P0"]
    relatives = "of train or valid that are relatives of a test protein"
    assert found["left_out"] == {"that the test has too": 1, relatives: 1}
    assert found["proteins"] == {"train": 8, "valid": 0, "test": 5}
    assert found["test_sets"] == {"CASP12": 1, "CASP13": 1, "CASP14": 1, "test": 2}


def test_variants_of_a_position_are_drawn_together(gym: Path) -> None:
    tasks = [task for task in find("proteingym", gym)[0] if task.group.startswith("fold")]
    variants = [f"{x}KTAYIAKQRQISFVKSHFS{y}Q" for x, y in ("AR", "MW", "CR", "ML")]
    for task in tasks:
        assert task.reading.cluster(variants) == [0, 1, 0, 1]
    assert len(tasks) == 3


def test_mistakes_are_named(flip: Path, tiny_run: Path, tmp_path: Path) -> None:
    write(flip / "gb1/splits/sampled.csv", "sequence,target,set", "MKT,1.5,train", "MK,2,train")
    for name, models, tasks, words in (
        ("flap", 1, (), "NAME=flap does not exist; there are: .*flip"),
        ("pbc", 1, (), "has no whole task of pbc: conservation lacks the file conservation; "),
        ("flip", 1, ("gb2",), "--tasks=gb2 does not exist; there are: gb1/one_vs_rest, gb1/s"),
        ("flip", 1, ("aav",), "--tasks=aav: in .*, aav/des_mut lacks the file aav/splits/des_mut"),
        ("flip", 2, (), "two models have one name"),
        ("flip", 1, ("gb1/sampled",), "^gb1/sampled: .*; --tasks runs other tasks"),
    ):
        with pytest.raises(UserError, match=words):
            options = BenchmarkOptions(tasks=tasks)
            benchmark(name, flip, [tiny_run] * models, tmp_path / "out", options)
    with pytest.raises(UserError, match=r"in the split test; .* a file of each split"):
        options = BenchmarkOptions(tasks=("gb1/sampled",), dry_run=True)
        benchmark("flip", flip, [tiny_run], tmp_path / "out", options)


def test_predictors_are_below_their_task_and_a_bound_may_be_zero() -> None:
    rows = [(task, "MCC", by, 0.5, 0.0, 0.6, 9, "z" * (by == "z")) for task in "ab" for by in "xyz"]
    (axes,) = benchmark_figure(rows, ["x"]).axes
    names = [one.get_text() for one in axes.get_yticklabels()]
    assert names == ["a, MCC", *"xyz", "b, MCC", *"xyz"]
    points, bars = zip(*((point, bars) for point, _, (bars,) in axes.containers), strict=True)
    assert [names[int(one.get_ydata()[0])] for one in points] == [*"xyzxyz"]
    assert len({one.get_color() for one in points}) == 3
    assert {one.get_segments()[0][0, 0] for one in bars} == {0}


def test_published_figures_have_an_address_and_are_of_a_task() -> None:
    tasks = {(row["benchmark"], row["task"].partition("/")[0]) for row in rows_of("benchmarks")}
    for row in rows_of("published"):
        assert (row["benchmark"], row["task"].partition("/")[0]) in tasks | {("contacts", "CASP14")}
        assert row["address"].startswith("https://") and row["table"] and row["split"]
        printed = float(row["printed"].partition(" ")[0].rstrip("%").replace(",", "."))
        assert float(row["value"]) in (printed, pytest.approx(printed / 100)) and row["head"]


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws")
def test_the_commands_of_the_page_run(
    flip: Path, gym: Path, workplace: Path, protlm_in_process: Command
) -> None:
    (workplace / "FLIP").mkdir()
    flip.rename(workplace / "FLIP" / "splits")
    gym.rename(workplace / "ProteinGym")
    Path(structure_folder(workplace, "test", 3)).rename(workplace / "CASP14")
    rows = [f"{x}\t{'ab'[n % 2]}\t{SETS[n]}" for n, x in enumerate(PROTEINS)]
    write(workplace / "labels.tsv", "sequence\tlabel\tsplit", *rows)
    run_page("benchmark.md", workplace, protlm_in_process, fewest=9)


def test_the_recipes_of_the_page_have_the_vectors_of_the_model(
    tiny_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their functions are called in place of the harnesses, which download their data."""
    model, some, ran = protlm.load(tiny_run), ["MKTAYI", "MKV"], []

    def autoeval(name: str, framework: str, **functions: Any) -> list[str]:
        residues, means = (functions[f"custom_embedding_function_per_{x}"] for x in KINDS)
        for (sequence, own), (_, mean) in zip(residues(some), means(some), strict=True):
            assert own.shape == (len(sequence), model.width)
            np.testing.assert_allclose(own.mean(0), mean, atol=1e-5)
        return ran.append(framework) or []

    def dgeb(one: Any) -> None:
        found = one.encode(some, batch_size=2)
        assert found.shape == (2, len(one.layers), one.metadata["embed_dim"])
        np.testing.assert_allclose(found[:, 1], model.embed(some, 2), atol=1e-5)
        ran.append(one.hf_name)

    harness = {"DGEB": lambda _: SimpleNamespace(run=dgeb), "get_tasks_by_modality": list}
    modules = {
        "biotrainer": SimpleNamespace(),
        "biotrainer.autoeval": SimpleNamespace(autoeval_pipeline=autoeval),
        "dgeb": SimpleNamespace(**harness, Modality=SimpleNamespace(PROTEIN=())),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(protlm, "load", lambda _: model)
    for recipe in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S):
        assert len([line for line in recipe.splitlines() if line]) <= 10
        exec(recipe, {})
    assert ran == ["pbc", "mine"]
