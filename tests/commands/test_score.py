"""`protlm score`: tables in and out, metrics, averages, scans, and mistakes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import protlm
from protlm.commands import score as score_command
from protlm.commands.score import scan_protein, score_variants
from protlm.data.vocabulary import STANDARD
from protlm.downstream.estimators import LogProbabilities, score
from protlm.downstream.variants import parse_mutant
from protlm.model.pretrained import PretrainedModel
from protlm.options.score import Estimator, ScoreOptions
from protlm.system.errors import InputDataError, UserError
from tests.fixtures.commands import ROOT, Command, read_table, run_page

WILD_TYPE = "MKTAYIAKQRQISFVKSHFSRQ"
MUTANTS = ["M1A", "K2R:T3S", "Y5W", "Q22E", "I6V:A7G:K8R"]
REFERENCE = "DMS_id,UniProt_ID,target_seq,coarse_selection_type"


@pytest.fixture(autouse=True)
def place(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a table of substitutions, measured scores among them, and their wild type."""
    monkeypatch.chdir(workplace)
    rows = [f"{mutant},{number / 7:.3f},note" for number, mutant in enumerate(MUTANTS)]
    Path("A_2020.csv").write_text("\n".join(["mutant,DMS_score,remark", *rows, ""]))


def options(**settings: Any) -> ScoreOptions:
    files = ("wild_type", "reference", "json", "figure")
    return ScoreOptions(**{n: Path(x) if n in files else x for n, x in settings.items()})


def run(sources: str = "A_2020.csv", output: str = "s.csv", **settings: Any) -> None:
    """Scores tables of the folder, by default of x.fasta and with the model `run`."""
    wild_type = {} if "reference" in settings else {"wild_type": "x.fasta"}
    tables = [Path(name) for name in sources.split()]
    model = Path(settings.pop("model", "run"))
    score_variants(tables, model, Path(output), options(**wild_type, **settings))


def test_what_a_causal_model_cannot_read_is_refused_before_any_score(
    causal_run: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workplace / "causal").symlink_to(causal_run)
    monkeypatch.setattr(PretrainedModel, "max_residues", property(lambda _: len(WILD_TYPE)))
    monkeypatch.setattr(score_command, "score", lambda *_, **__: pytest.fail("a table is scored"))
    Path("indels.csv").write_text(f"mutated_sequence,DMS_score\n{WILD_TYPE}KK,1\n")
    with pytest.raises(UserError, match=r"^indels.csv: a sequence of 24 residues is longer .*22"):
        run("A_2020.csv indels.csv", "out", model="causal")


def test_scores_are_added_as_columns(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (Estimator.masked_marginals, Estimator.wt_marginals)
    run(output="new/scores.tsv", estimators=asked)
    printed = capsys.readouterr().out
    assert printed.endswith("new/scores.tsv\n")
    assert "Spearman" in printed and "sum over M of log p(y_i | x\\i)" in printed
    assert "fewer than 10 measured variants: metrics are uncertain" in printed
    assert "NDCG of fewer than ten variants is undefined" in printed
    rows, before = read_table("new/scores.tsv"), read_table("A_2020.csv")
    assert list(rows[0]) == [*before[0], *asked]
    assert [{name: row[name] for name in before[0]} for row in rows] == before
    predictor = LogProbabilities(protlm.load("run"))
    variants = [parse_mutant(mutant, WILD_TYPE) for mutant in MUTANTS]
    for estimator in asked:
        values = score(estimator, predictor, WILD_TYPE, variants).values
        found = [float(row[estimator]) for row in rows]
        np.testing.assert_allclose(found, values, atol=1e-6)


def test_rows_without_scores_are_counted_and_written(
    workplace: Path, protlm_in_process: Command
) -> None:
    table = "mutant,Fitness,note\nM1A,1,=A1\np.Lys2Ter,2,-\np.Thr3Ser,3,-x\n_wt,4,\n"
    Path("v.csv").write_text(table)
    typed = ["score", "v.csv", "-m", "run", "-o", "s.csv", "--wild-type", "x.fasta"]
    assert "line 3: 'p.Lys2Ter' is not a" in protlm_in_process(*typed, cwd=workplace, code=3).stderr
    done = protlm_in_process(*typed, "--skip-invalid", cwd=workplace)
    assert "; rows left unscored: 1" in done.stderr
    assert (
        "has no column DMS_score to compare with; for another, type --label Fitness" in done.stderr
    )
    assert "perplexity of wild type" in done.stdout
    assert all(name not in done.stdout for name in ("Spearman", "AUC", "NDCG"))
    rows = read_table("s.csv")
    assert [row["masked-marginals"] == "" for row in rows] == [False, True, False, False]
    assert [row["note"] for row in rows] == ["'=A1", "-", "'-x", ""]
    assert float(rows[3]["masked-marginals"]) == 0


def test_several_assays_and_their_averages(capsys: pytest.CaptureFixture[str]) -> None:
    sequences = [WILD_TYPE[:place] + WILD_TYPE[place + 1 :] for place in range(4)]
    rows = [f"{sequence},{number % 3},1" for number, sequence in enumerate(sequences)]
    Path("B_2021.csv").write_text("\n".join(["mutated_sequence,DMS_score,DMS_score_bin", *rows]))
    Path("reference.csv").write_text(
        f"{REFERENCE}\nA_2020,A,{WILD_TYPE},Activity\nB_2021,B,{WILD_TYPE},Stability\n"
    )
    settings = {"estimators": (Estimator.pseudo_log_likelihood,), "per_token": True}
    run("A_2020.csv B_2021.csv", "s", reference="reference.csv", json="m.json", **settings)
    printed, names = capsys.readouterr().out, ["A_2020", "B_2021"]
    assert sorted(path.stem for path in Path("s").iterdir()) == names
    report = json.loads(Path("m.json").read_text())
    assert report["model_hash"] == protlm.load("run").hash
    assert "divided by" in report["definitions"]["pseudo-log-likelihood"]
    found = [report["assays"][name]["pseudo-log-likelihood"] for name in names]
    spearman = [one["metrics"]["Spearman"] for one in found]
    means = report["average_spearman"]["pseudo-log-likelihood"]
    expected = {"Activity": spearman[0], "Stability": spearman[1]}
    assert means == pytest.approx({**expected, "mean of types": np.mean(spearman)})
    assert f"mean of types {means['mean of types']:.3f}" in printed
    assert [one["classes"] for one in found] == ["median", "bins"]
    # All variants of B are fit, for which AUC is not defined.
    assert found[1]["metrics"]["AUC"] is None
    low, high = found[0]["intervals"]["Spearman"]
    assert low <= spearman[0] <= high


def test_clinical_variants_have_an_auc_by_gene(capsys: pytest.CaptureFixture[str]) -> None:
    bins = ("Benign", "Pathogenic", "benign", "", "Pathogenic")
    for gene, shift in (("NP_1", 0), ("NP_2", 1)):
        given = [bins[(n + shift) % 5] for n in range(5)]
        rows = [f"{n},{gene},{mutant},{given[n]}" for n, mutant in enumerate(MUTANTS)]
        Path(f"{gene}.csv").write_text("\n".join([",protein,mutant,DMS_bin_score", *rows]))
    Path("reference.csv").write_text(f"DMS_id,target_seq\nNP_1,{WILD_TYPE}\nNP_2,{WILD_TYPE}\n")
    run("NP_1.csv NP_2.csv", "s", reference="reference.csv", json="m.json")
    printed, report = capsys.readouterr().out, json.loads(Path("m.json").read_text())
    found, expected = [], []
    for gene in ("NP_1", "NP_2"):
        one = report["assays"][gene]["masked-marginals"]
        assert (one["classes"], one["measured"]) == ("clinical", 4)
        rows = [row for row in read_table(f"s/{gene}.csv") if row["DMS_bin_score"]]
        is_benign = [row["DMS_bin_score"].lower() == "benign" for row in rows]
        scores = [float(row["masked-marginals"]) for row in rows]
        found.append(one["metrics"]["AUC"])
        expected.append(roc_auc_score(is_benign, scores))
    assert found == pytest.approx(expected)
    mean = report["average_auc"]["masked-marginals"]["mean of types"]
    assert mean == pytest.approx(np.mean(expected)) and report["average_spearman"] == {}
    assert f"average AUC, masked-marginals: mean of types {mean:.3f}" in printed
    assert "Spearman" not in printed
    Path("NP_1.csv").write_text("mutant,DMS_bin_score\nM1A,Likely\n")
    with pytest.raises(InputDataError, match="line 2: DMS_bin_score of variant 1 is 'Likely'"):
        run("NP_1.csv")


def scan(sources: str = "x.fasta", model: str = "run", **settings: Any) -> list[dict[str, str]]:
    """Scans a protein of the folder."""
    scan_protein([Path(sources)], Path(model), Path("s.csv"), options(**settings))
    return read_table("s.csv")


def test_a_scan_scores_all_substitutions(capsys: pytest.CaptureFixture[str]) -> None:
    rows = scan(first_residue=24, figure="scan.png")
    assert "perplexity of the wild type" in capsys.readouterr().out
    assert Path("scan.png").stat().st_size > 0
    assert list(rows[0]) == ["position", "wild_type", *STANDARD]
    assert "".join(row["wild_type"] for row in rows) == WILD_TYPE
    assert [int(row["position"]) for row in rows] == list(range(24, 24 + len(WILD_TYPE)))
    predictor = LogProbabilities(protlm.load("run"))
    variants = [parse_mutant(f"K2{letter}", WILD_TYPE) for letter in STANDARD]
    values = score(Estimator.masked_marginals, predictor, WILD_TYPE, variants).values
    found = [float(rows[1][letter]) for letter in STANDARD]
    np.testing.assert_allclose(found, values, atol=1e-6)
    assert float(rows[1]["K"]) == 0


@pytest.mark.parametrize("estimator", [Estimator.wt_marginals, Estimator.pseudo_log_likelihood])
def test_a_scan_leaves_unknown_residues_empty(
    estimator: Estimator, look_at: Callable[..., None]
) -> None:
    Path("unknown.fasta").write_text(">P1\nMXTU\n")
    drawn: list[np.ndarray] = []
    look_at(score_command, "scan_figure", lambda scores, *_, **__: drawn.append(scores))
    rows = scan("unknown.fasta", estimators=(estimator,), figure="scan.svg")
    assert np.isfinite(drawn).all()
    assert [row["wild_type"] for row in rows] == list("MXTU")
    filled = [{bool(row[letter]) for letter in STANDARD} for row in rows]
    assert filled == [{True}, {False}, {True}, {False}]
    variants = [parse_mutant("T3W", "MXTU")]
    (expected,) = score(estimator, LogProbabilities(protlm.load("run")), "MXTU", variants).values
    assert float(rows[2]["W"]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_a_second_estimator_adds_a_column() -> None:
    run()
    run("s.csv", "t.csv", estimators=(Estimator.wt_marginals,))
    assert list(read_table("t.csv")[0])[-2:] == ["masked-marginals", "wt-marginals"]
    # A pattern of a shell can match one table.
    run(output="folder")
    assert Path("folder/A_2020.csv").read_text() == Path("s.csv").read_text()


def test_assays_without_a_correlation_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    Path("B_2021.csv").write_text("mutant,DMS_score\nM1A,1\nM1C,1\n")
    Path("reference.csv").write_text(f"DMS_id,target_seq\nA_2020,{WILD_TYPE}\nB_2021,{WILD_TYPE}\n")
    run("A_2020.csv B_2021.csv", "s", reference="reference.csv", json="m.json")
    words = "without 1 of the assays, where it is undefined"
    assert words in " ".join(capsys.readouterr().out.split())
    report = json.loads(Path("m.json").read_text())
    assert report["left_out_of_average"] == {"masked-marginals": ["B_2021"]}
    found = report["assays"]["A_2020"]["masked-marginals"]["metrics"]["Spearman"]
    assert report["average_spearman"]["masked-marginals"]["mean of types"] == found
    run("B_2021.csv", "only.csv", reference="reference.csv", json="only.json")
    printed = capsys.readouterr()
    assert words in " ".join(printed.out.split())
    assert "only.csv is complete\n" in printed.err
    report = json.loads(Path("only.json").read_text())
    assert report["average_spearman"] == {"masked-marginals": {}}


@pytest.mark.slow
def test_the_commands_of_the_page_run(
    workplace: Path, causal_run: Path, protlm_in_process: Command
) -> None:
    table = (ROOT / "docs" / "score.md").read_text().split("```text\n")[1].split("```")[0]
    (workplace / "variants.csv").write_text(table)
    (workplace / "protein.fasta").write_text(f">P1\n{WILD_TYPE}\n")
    (workplace / "indels.csv").write_text(f"mutated_sequence,DMS_score\n{WILD_TYPE}K,1\n")
    (workplace / "DMS").mkdir()
    (workplace / "DMS" / "A_2020.csv").write_text(table)
    reference = f"{REFERENCE}\nA_2020,A,{WILD_TYPE},Activity\n"
    (workplace / "DMS_substitutions.csv").write_text(reference)
    (workplace / "runs").mkdir()
    (workplace / "runs" / "causal").symlink_to(causal_run)
    run_page("score.md", workplace, protlm_in_process, fewest=4)
