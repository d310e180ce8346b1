"""`protlm evaluate`: whole proteins, counted crops, and the default split."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import protlm
from protlm.commands.evaluate import evaluate, provenance
from protlm.config import EvaluateConfig
from protlm.config.composition import compose
from protlm.data.shards.data_set import open_split
from protlm.data.shards.manifest import MANIFEST, MANIFEST_SHA256
from protlm.data.vocabulary import VOCABULARY
from protlm.system.errors import InputDataError, OutputError, UserError
from tests.fixtures.commands import read_table
from tests.fixtures.runs import Train


def lengths(data: Path, split: str = "test") -> np.ndarray:
    reader = open_split(data, split)
    return reader.lengths_of(np.arange(len(reader)))


def run(model: Path, data: Path, *overrides: str) -> dict:
    settings = [f"checkpoint={model}", f"data.dir={data}", "evaluation=[causal]", *overrides]
    return evaluate(compose(EvaluateConfig, settings))["results"]


def test_whole_proteins_are_evaluated(
    tiny_run: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model was trained on rows of 128 tokens, and has rotary positions."""
    found = lengths(tiny_data)
    assert found.max() > 126
    values = run(tiny_run, tiny_data)["test"]["causal"]
    assert values["targets"] == found.sum()
    assert values["cropped"] == {"sequences": 0, "residues": 0}
    assert f"test: 0 of {len(found)} sequences cropped" in capsys.readouterr().out


@pytest.mark.parametrize("reason", ["a table of positions", "the setting max_length"])
def test_crops_are_counted(
    reason: str,
    train_tiny: Train,
    tiny_run: Path,
    tiny_data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, settings = tiny_run, ["evaluation.causal.max_length=128"]
    if reason == "a table of positions":
        table = ("model.positions=learned", "model.max_length=128", "trainer.max_steps=2")
        model, settings = train_tiny(tmp_path / "run", *table), []
    found = lengths(tiny_data)
    lost = np.maximum(found - 126, 0)
    values = run(model, tiny_data, *settings)["test"]["causal"]
    assert values["targets"] == found.sum() - lost.sum()
    assert values["cropped"] == {"sequences": (lost > 0).sum(), "residues": lost.sum()}
    printed = f"{(lost > 0).sum()} of {len(found)} sequences cropped, by {lost.sum():,} residues"
    assert printed in capsys.readouterr().out


def test_no_output_is_in_the_way(tiny_run: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Each is refused before the model is read."""
    (tmp_path / "sums.test.csv").touch()
    with pytest.raises(OutputError, match=r"sums.test.csv exists already"):
        run(tmp_path, tiny_data, f"evaluation.causal.per_sequence={tmp_path / 'sums.csv'}")
    with pytest.raises(UserError, match=r"not the name of a table.*per_sequence=sums.tsv"):
        run(tmp_path, tiny_data, "evaluation.causal.per_sequence=sums")
    run(tiny_run, tiny_data, f"evaluation.causal.per_sequence={tmp_path / 'other.csv'}")
    header, *rows = (tmp_path / "other.test.csv").read_text().splitlines()
    assert header.startswith("accession,group,targets,") and len(rows) == len(lengths(tiny_data))


def renamed(data: Path, folder: Path, write: Callable[[Path, str], None], new: str) -> Path:
    """A copy of a data set whose split `test` has another name."""
    shutil.copytree(data, folder)
    (folder / "test").rename(folder / new)
    manifest = (folder / MANIFEST).read_text()
    write(folder, manifest.replace('"test":', f'"{new}":').replace('"test/', f'"{new}/'))
    return folder


def test_the_default_split_is_the_test_split(
    tiny_run: Path, tiny_data: Path, tmp_path: Path, write_manifest: Callable[[Path, str], None]
) -> None:
    assert set(run(tiny_run, tiny_data)) == {"test"}
    iid = renamed(tiny_data, tmp_path / "iid", write_manifest, "test_iid")
    assert set(run(tiny_run, iid)) == {"test_iid"}
    other = renamed(tiny_data, tmp_path / "other", write_manifest, "held_out")
    with pytest.raises(UserError, match=r"neither test nor test_iid.*split=held_out; it has: held"):
        run(tiny_run, other)


def test_a_run_is_evaluated_on_its_own_data(
    tiny_run: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = evaluate(compose(EvaluateConfig, [f"checkpoint={tiny_run}", "evaluation=[masked]"]))
    assert report["data"] == (tiny_data / MANIFEST_SHA256).read_text().split()[0]
    assert f"data.dir={tiny_data}, as in {tiny_run}" in capsys.readouterr().err


def test_a_report_has_what_is_printed_its_data_and_its_settings(
    tiny_run: Path, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "o.json"
    settings = ["split=[test,valid]", "evaluation.causal.max_length=99", f"output={output}"]
    run(tiny_run, tiny_data, "evaluation=[masked,causal]", *settings)
    report = json.loads(output.read_text())
    printed = capsys.readouterr().out
    assert "causal: the model was trained with objective=masked, not causal\n" in printed
    assert "masked: the model was" not in printed
    assert set(report["results"]) == {"test", "valid"}
    assert f"{report['results']['test']['masked']['model']['perplexity']:.2f}" in printed
    assert report["data"] == (tiny_data / MANIFEST_SHA256).read_text().split()[0]
    assert report["version"] == protlm.__version__
    settings = report["settings"]
    assert settings["evaluation"]["causal"]["max_length"] == 99
    assert settings["data"]["dir"] == str(tiny_data) and settings["data"]["verify"] == "full"
    assert not {"checkpoint", "output"} & set(settings)
    asked = ["evaluation=[secondary_structure]", f"data.dir={tmp_path / 'missing'}"]
    assert provenance(compose(EvaluateConfig, asked))["data"] is None


def write_families(data: Path, folder: Path, kind: str) -> dict[str, str]:
    """Writes two relatives of each test protein; returns the residues of these by name."""
    reader = open_split(data, "test")
    found = {reader.identifier(n): VOCABULARY.decode(reader[n]) for n in range(len(reader))}
    folder.mkdir()
    for name, text in found.items():
        rows = [text, text.replace("L", "V"), text.replace("A", "G")]
        (folder / f"{name}.{kind}").write_text("".join(f">{x[:9]}\n{x}\n" for x in rows))
    return found


@pytest.mark.slow
def test_sequences_are_evaluated_in_contexts_of_their_relatives(
    causal_run: Path, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each alone in its contexts, as `score` reads a wild type."""
    families = tmp_path / "families"
    queries = write_families(tiny_data, families, "a3m")
    given = [f"relatives={families}", "contexts=2", "relatives_tokens=2000", "force_relatives=true"]
    output = [f"output={tmp_path / 'o.json'}"]
    sums = [f"evaluation.causal.per_sequence={tmp_path / 'sums.tsv'}"]
    run(causal_run, tiny_data, *given, *sums, *output)
    told, files = capsys.readouterr(), [tmp_path / "sums.test.tsv", tmp_path / "o.json"]
    assert "model, with relatives" in told.out
    assert "".join(f"written: {file}\n" for file in files) in told.err
    model = protlm.load(causal_run)
    relatives = model.relatives(families, contexts=2, tokens=2_000, force=True)
    rows = read_table(tmp_path / "sums.test.tsv")
    for row, query in zip(rows, queries.items(), strict=True):
        perplexity = model.perplexity([query], relatives=relatives)[0]
        found = np.exp(float(row["nats"]) / float(row["targets"]))
        assert found == pytest.approx(perplexity, rel=1e-4)
    lines = (tmp_path / "o.json.relatives.jsonl").read_text().splitlines()
    assert [json.loads(line)["query"] for line in lines] == [*queries]
    with pytest.raises(
        UserError, match=r"trained without.*nevertheless; type force_relatives=true"
    ):
        run(causal_run, tiny_data, *given[:2])
    rows = ["evaluation.causal.concatenated=true", "evaluation.causal.max_length=99"]
    for refused in (["evaluation=[heads]"], rows):
        with pytest.raises(UserError, match="relatives="):
            run(causal_run, tiny_data, *given, *refused)
    (families / f"{next(iter(queries))}.a3m").unlink()
    with pytest.raises(
        UserError, match=f"for 1 of {len(queries)} queries, the first of them.*allow_none=true"
    ):
        run(causal_run, tiny_data, *given)


def test_what_relatives_are_worth_is_printed_and_drawn(
    tiny_run: Path, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that was trained without relatives is measured, too."""
    folder, name = tmp_path / "families", "evaluation.relatives"
    queries = write_families(tiny_data, folder, "fasta")
    given = ["evaluation=[relatives]", f"relatives={folder}", "force_relatives=true"]
    given += [f"{name}.numbers=[1]", f"{name}.max_identity=1.0", f"{name}.controls=false"]
    output, figure = tmp_path / "o.json", tmp_path / "curve.png"
    more = [f"{name}.figure={figure}", f"output={output}"]
    found = run(tiny_run, tiny_data, *given, *more)["test"]["relatives"]
    printed = capsys.readouterr().out
    assert found["queries"] == len(queries) and "not None" not in printed
    difference = found["differences"]["model - alone"]
    assert f"test: model - alone: {difference['mean']:+.3f} (" in printed
    lines = printed.splitlines()
    (row,) = (line for line in lines if line.split()[:1] == ["1"])
    assert row.split()[1] == f"{found['curve']['1']['model']['nats']['mean']:.3f}"
    heading = next(line for line in lines if "mixed alone" in line)
    assert len(heading.rstrip()) <= 80 and heading.split()[0] == "relatives"
    assert (tmp_path / "curve.test.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(output.read_text())["results"]["test"]["relatives"] == json.loads(
        json.dumps(found)
    )
    # Of a second split there are no relatives: what was written of the first one goes.
    given += ["split=[test,valid]", "allow_none=true", f"{name}.per_query={tmp_path / 'none.tsv'}"]
    with pytest.raises(InputDataError, match="fewer than 1 relatives"):
        run(tiny_run, tiny_data, *given)
    assert not [*tmp_path.glob("none.*"), *tmp_path.glob("*.jsonl")]
