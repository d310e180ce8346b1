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
from protlm.system.errors import OutputError, UserError
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
