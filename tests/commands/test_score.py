"""`protlm score`: tables in and out, metrics, averages, scans, and mistakes."""

import csv
import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import protlm
from protlm.commands import score as score_command
from protlm.commands.score import ScoreOptions, scan_protein, score_variants
from protlm.data.vocabulary import STANDARD
from protlm.downstream.estimators import Estimator, score
from protlm.downstream.mutations import parse_mutant
from protlm.downstream.predictions import Predictor
from protlm.model.pretrained import PretrainedModel
from protlm.plots import save_figure, scan_figure
from protlm.system.errors import InputDataError, OutputError, UserError

Command = Callable[..., "subprocess.CompletedProcess[str]"]
ROOT = Path(__file__).resolve().parents[2]
WILD_TYPE = "MKTAYIAKQRQISFVKSHFSRQ"
MUTANTS = ["M1A", "K2R:T3S", "Y5W", "Q22E", "I6V:A7G:K8R"]


@pytest.fixture
def assay(workplace: Path) -> Path:
    """A table of substitutions with measured scores, and x.fasta with their wild type."""
    rows = [f"{mutant},{number / 7:.3f},note" for number, mutant in enumerate(MUTANTS)]
    path = workplace / "A_2020.csv"
    path.write_text("\n".join(["mutant,DMS_score,remark", *rows, ""]))
    return path


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        separator = "\t" if path.suffix == ".tsv" else ","
        return list(csv.DictReader(file, delimiter=separator))


def options(folder: Path, *estimators: Estimator) -> ScoreOptions:
    return ScoreOptions(wild_type=folder / "x.fasta", estimators=estimators)


def test_what_a_causal_model_cannot_read_is_refused_before_any_score(
    assay: Path,
    workplace: Path,
    train_tiny: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    causal = train_tiny(tmp_path / "causal", "objective=causal", "trainer.max_steps=2")
    monkeypatch.setattr(PretrainedModel, "max_residues", property(lambda _: len(WILD_TYPE)))
    monkeypatch.setattr(score_command, "score", lambda *_, **__: pytest.fail("a table is scored"))
    indels = workplace / "indels.csv"
    indels.write_text(f"mutated_sequence,DMS_score\n{WILD_TYPE}KK,1\n")
    with pytest.raises(
        UserError, match=rf"^{indels}: a sequence of 24 residues is longer than .*22"
    ):
        score_variants([assay, indels], causal, tmp_path / "out", options(workplace))


def test_scores_are_added_as_columns(
    assay: Path, tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = (Estimator.masked_marginals, Estimator.wt_marginals)
    output = tmp_path / "new" / "scores.tsv"
    score_variants([assay], tiny_run, output, options(tmp_path, *asked))
    printed = capsys.readouterr().out
    assert printed.endswith(f"{output}\n")
    assert "Spearman" in printed and "sum over M of log p(y_i | x\\i)" in printed
    assert "fewer than 10 measured variants: NDCG is undefined" in printed
    rows, before = read(output), read(assay)
    assert list(rows[0]) == [*before[0], *asked]
    assert [{name: row[name] for name in before[0]} for row in rows] == before
    predictor = Predictor(protlm.load(tiny_run))
    variants = [parse_mutant(mutant, WILD_TYPE) for mutant in MUTANTS]
    for estimator in asked:
        values = score(estimator, predictor, WILD_TYPE, variants).values
        found = [float(row[estimator]) for row in rows]
        np.testing.assert_allclose(found, values, atol=1e-6)


def test_a_table_without_measured_scores_has_no_metrics(
    tiny_run: Path, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = workplace / "v.csv"
    table.write_text("mutant\nM1A\n")
    score_variants([table], tiny_run, workplace / "s.csv", options(workplace))
    printed = capsys.readouterr().out
    assert "perplexity of wild type" in printed
    assert all(name not in printed for name in ("Spearman", "AUC", "NDCG"))


def test_rows_without_scores_are_counted_and_written(
    tiny_run: Path, workplace: Path, protlm_in_process: Command
) -> None:
    table = workplace / "v.csv"
    table.write_text("mutant,Fitness,note\nM1A,1,=A1\np.Lys2Ter,2,-\np.Thr3Ser,3,-x\n_wt,4,\n")
    typed = ["score", "v.csv", "-m", tiny_run, "-o", "s.csv", "--wild-type", "x.fasta"]
    refused = protlm_in_process(*typed, cwd=workplace)
    assert refused.returncode == 3 and "line 3: 'p.Lys2Ter' is not a" in refused.stderr
    done = protlm_in_process(*typed, "--skip-invalid", cwd=workplace)
    assert done.returncode == 0 and "; rows left unscored: 1" in done.stderr
    assert "has no column DMS_score to compare with; if Fitness is that" in done.stderr
    rows = read(workplace / "s.csv")
    assert [row["masked-marginals"] == "" for row in rows] == [False, True, False, False]
    assert [row["note"] for row in rows] == ["'=A1", "-", "'-x", ""]
    assert float(rows[3]["masked-marginals"]) == 0


def test_several_assays_and_their_averages(
    assay: Path, tiny_run: Path, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    indels = workplace / "B_2021.csv"
    sequences = [WILD_TYPE[:place] + WILD_TYPE[place + 1 :] for place in range(4)]
    rows = [f"{sequence},{number % 3},1" for number, sequence in enumerate(sequences)]
    indels.write_text("\n".join(["mutated_sequence,DMS_score,DMS_score_bin", *rows, ""]))
    reference = workplace / "reference.csv"
    reference.write_text(
        "DMS_id,UniProt_ID,target_seq,coarse_selection_type\n"
        f"A_2020,A,{WILD_TYPE},Activity\nB_2021,B,{WILD_TYPE},Stability\n"
    )
    settings = ScoreOptions(
        reference=reference,
        estimators=(Estimator.pseudo_log_likelihood,),
        per_token=True,
        json=workplace / "metrics.json",
    )
    score_variants([assay, indels], tiny_run, workplace / "scores", settings)
    printed = capsys.readouterr().out
    assert sorted(path.name for path in (workplace / "scores").iterdir()) == [
        "A_2020.csv",
        "B_2021.csv",
    ]
    report = json.loads((workplace / "metrics.json").read_text())
    assert report["model_hash"] == protlm.load(tiny_run).hash
    assert "divided by" in report["definitions"]["pseudo-log-likelihood"]
    spearman = [
        report["assays"][name]["pseudo-log-likelihood"]["metrics"]["Spearman"]
        for name in ("A_2020", "B_2021")
    ]
    means = report["average_spearman"]["pseudo-log-likelihood"]
    expected = {"Activity": spearman[0], "Stability": spearman[1]}
    assert means == pytest.approx({**expected, "mean of types": np.mean(spearman)})
    assert f"mean of types {means['mean of types']:.3f}" in printed
    classes = [
        report["assays"][name]["pseudo-log-likelihood"]["classes"] for name in ("A_2020", "B_2021")
    ]
    assert classes == ["median", "bins"]
    # All variants of B are fit, for which AUC is not defined.
    assert report["assays"]["B_2021"]["pseudo-log-likelihood"]["metrics"]["AUC"] is None


def test_a_scan_scores_all_substitutions(
    tiny_run: Path, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ScoreOptions(first_residue=24, figure=workplace / "scan.png")
    scan_protein([workplace / "x.fasta"], tiny_run, workplace / "scan.csv", settings)
    assert "perplexity of the wild type" in capsys.readouterr().out
    assert (workplace / "scan.png").stat().st_size > 0
    rows = read(workplace / "scan.csv")
    assert list(rows[0]) == ["position", "wild_type", *STANDARD]
    assert "".join(row["wild_type"] for row in rows) == WILD_TYPE
    assert [int(row["position"]) for row in rows] == list(range(24, 24 + len(WILD_TYPE)))
    predictor = Predictor(protlm.load(tiny_run))
    variants = [parse_mutant(f"K2{letter}", WILD_TYPE) for letter in STANDARD]
    values = score(Estimator.masked_marginals, predictor, WILD_TYPE, variants).values
    found = [float(rows[1][letter]) for letter in STANDARD]
    np.testing.assert_allclose(found, values, atol=1e-6)
    assert float(rows[1]["K"]) == 0


@pytest.mark.parametrize("estimator", [Estimator.wt_marginals, Estimator.pseudo_log_likelihood])
def test_a_scan_leaves_unknown_residues_empty(
    estimator: Estimator, tiny_run: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workplace / "unknown.fasta").write_text(">P1\nMXTU\n")
    drawn: list[np.ndarray] = []

    def watched(scores: np.ndarray, *rest: str, **named: object) -> object:
        drawn.append(scores)
        return scan_figure(scores, *rest, **named)

    monkeypatch.setattr("protlm.commands.score.scan_figure", watched)
    settings = ScoreOptions(estimators=(estimator,), figure=workplace / "scan.svg")
    scan_protein([workplace / "unknown.fasta"], tiny_run, workplace / "scan.csv", settings)
    assert np.isfinite(drawn).all()
    rows = read(workplace / "scan.csv")
    assert [row["wild_type"] for row in rows] == list("MXTU")
    filled = [{bool(row[letter]) for letter in STANDARD} for row in rows]
    assert filled == [{True}, {False}, {True}, {False}]
    variants = [parse_mutant("T3W", "MXTU")]
    (expected,) = score(estimator, Predictor(protlm.load(tiny_run)), "MXTU", variants).values
    assert float(rows[2]["W"]) == pytest.approx(expected, abs=1e-6)


def wild_types(folder: Path) -> dict[str, ScoreOptions]:
    (folder / "two.fasta").write_text(">P1\nMKT\n>P2\nMKT\n")
    (folder / "reference.csv").write_text("DMS_id,target_seq\nother,MKT\n")
    return {
        "neither is given": ScoreOptions(),
        "both are given": ScoreOptions(folder / "x.fasta", folder / "reference.csv"),
        "has 2 proteins; give a file of one protein": ScoreOptions(folder / "two.fasta"),
        "has no row with the DMS_id A_2020": ScoreOptions(None, folder / "reference.csv"),
    }


def test_a_missing_wild_type_is_explained(assay: Path, tiny_run: Path, workplace: Path) -> None:
    for words, settings in wild_types(workplace).items():
        with pytest.raises(UserError, match=words):
            score_variants([assay], tiny_run, workplace / "s.csv", settings)
    assert not (workplace / "s.csv").exists()


def test_a_sequence_file_is_not_a_table(tiny_run: Path, workplace: Path) -> None:
    with pytest.raises(UserError, match=r"x.fasta is a sequence file.*x.fasta --scan -o SCORES"):
        score_variants([workplace / "x.fasta"], tiny_run, workplace / "s.csv", ScoreOptions())


def test_every_table_is_checked_before_the_first_is_scored(
    assay: Path, tiny_run: Path, workplace: Path
) -> None:
    wrong = workplace / "wrong.csv"
    wrong.write_text("mutant\nM1A\nA2P\n")
    with pytest.raises(InputDataError, match=r"wrong\.csv, line 3: A2P: position 2 of the wild"):
        score_variants([assay, wrong], tiny_run, workplace / "s", options(workplace))
    wrong.write_text("mutated_sequence\nMKT\n")
    with pytest.raises(UserError, match=r"wrong\.csv: --estimator masked-marginals cannot score"):
        score_variants([assay, wrong], tiny_run, workplace / "s", options(workplace))
    assert not (workplace / "s").exists()


def test_columns_and_files_are_never_replaced(assay: Path, tiny_run: Path, workplace: Path) -> None:
    first, second = workplace / "s.csv", workplace / "t.csv"
    score_variants([assay], tiny_run, first, options(workplace))
    with pytest.raises(OutputError, match="exists already"):
        score_variants([assay], tiny_run, first, options(workplace))
    with pytest.raises(UserError, match="already has a column masked-marginals"):
        score_variants([first], tiny_run, second, options(workplace))
    score_variants([first], tiny_run, second, options(workplace, Estimator.wt_marginals))
    assert list(read(second)[0])[-2:] == ["masked-marginals", "wt-marginals"]
    # A pattern of a shell can match one table.
    score_variants([assay], tiny_run, workplace / "folder", options(workplace))
    assert (workplace / "folder" / "A_2020.csv").read_text() == first.read_text()
    copy = workplace / "copy" / assay.name
    copy.parent.mkdir()
    copy.write_text(assay.read_text())
    with pytest.raises(UserError, match="A_2020 is the name of several tables"):
        score_variants([assay, copy], tiny_run, workplace / "s", options(workplace))
    with pytest.raises(UserError, match=r"new\.csv is the name of one table, and there are 2"):
        score_variants([assay, first], tiny_run, workplace / "new.csv", options(workplace))


def test_two_outputs_are_never_the_same_file(
    assay: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model, which does not exist here, is read."""
    monkeypatch.chdir(workplace)
    for output, json_ in (("s.csv", "./s.csv"), ("s", "s/A_2020.csv"), ("s", "s")):
        settings = replace(options(workplace), json=workplace / json_)
        with pytest.raises(UserError, match=r"--json .* would write the same file"):
            score_variants([assay], Path("no_model"), Path(output), settings)
    figure = ScoreOptions(figure=workplace / "s.csv")
    with pytest.raises(UserError, match=r"--figure .* would write the same file"):
        scan_protein([workplace / "x.fasta"], Path("no_model"), Path("s.csv"), figure)


def test_a_figure_of_another_format_is_refused_first(workplace: Path) -> None:
    figure = scan_figure(np.zeros((1, len(STANDARD))), "M", title="M")

    def scan(name: str) -> None:
        settings = ScoreOptions(figure=workplace / name)
        scan_protein([workplace / "x.fasta"], Path("no_model"), workplace / "s.csv", settings)

    with pytest.raises(UserError, match=r"s\.jpg is not a figure.*type: --figure .*s\.png"):
        scan("s.jpg")
    for suffix in ("png", "PDF", "svg"):
        with pytest.raises(InputDataError, match="no_model"):
            scan(f"s.{suffix}")
        save_figure(figure, workplace / f"s.{suffix}")
    with pytest.raises(UserError, match="is not a figure"):
        save_figure(figure, workplace / "s.jpg")


def test_assays_without_a_correlation_are_counted(
    assay: Path, tiny_run: Path, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workplace / "B_2021.csv").write_text("mutant,DMS_score\nM1A,1\nM1C,1\n")
    (workplace / "reference.csv").write_text(
        f"DMS_id,target_seq\nA_2020,{WILD_TYPE}\nB_2021,{WILD_TYPE}\n"
    )
    settings = ScoreOptions(reference=workplace / "reference.csv", json=workplace / "m.json")
    score_variants([assay, workplace / "B_2021.csv"], tiny_run, workplace / "s", settings)
    words = "without 1 of the assays, where it is undefined"
    assert words in " ".join(capsys.readouterr().out.split())
    report = json.loads((workplace / "m.json").read_text())
    assert report["left_out_of_average"] == {"masked-marginals": ["B_2021"]}
    found = report["assays"]["A_2020"]["masked-marginals"]["metrics"]["Spearman"]
    assert report["average_spearman"]["masked-marginals"]["mean of types"] == found
    settings = replace(settings, json=workplace / "only.json")
    score_variants([workplace / "B_2021.csv"], tiny_run, workplace / "only.csv", settings)
    printed = capsys.readouterr()
    assert words in " ".join(printed.out.split())
    assert f"{workplace / 'only.csv'} is complete\n" in printed.err
    report = json.loads((workplace / "only.json").read_text())
    assert report["average_spearman"] == {"masked-marginals": {}}


def test_the_commands_of_the_page_run(
    workplace: Path, train_tiny: Callable[..., Path], protlm_in_process: Command
) -> None:
    """All commands of docs/score.md, with the files that it names."""
    page = (ROOT / "docs" / "score.md").read_text()
    shown = re.findall(r"^```csv\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (workplace / "variants.csv").write_text(shown[0])
    (workplace / "protein.fasta").write_text(f">P1\n{WILD_TYPE}\n")
    (workplace / "indels.csv").write_text(f"mutated_sequence,DMS_score\n{WILD_TYPE}K,1\n")
    (workplace / "DMS").mkdir()
    (workplace / "DMS" / "A_2020.csv").write_text(shown[0])
    reference = "DMS_id,UniProt_ID,target_seq,coarse_selection_type"
    (workplace / "DMS_substitutions.csv").write_text(
        f"{reference}\nA_2020,A,{WILD_TYPE},Activity\n"
    )
    (workplace / "runs").mkdir()
    (workplace / "runs" / "mine").symlink_to(workplace / "run")
    train_tiny(workplace / "runs" / "causal", "objective=causal", "trainer.max_steps=2")
    blocks = re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    commands = "".join(blocks).replace("\\\n", " ").splitlines()
    assert len(commands) >= 4
    for command in commands:
        typed = command.split("#")[0].replace("DMS/*.csv", "DMS/A_2020.csv").split()
        assert typed[:2] == ["protlm", "score"]
        done = protlm_in_process(*typed[1:], cwd=workplace)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        assert (workplace / typed[typed.index("-o") + 1]).exists()
