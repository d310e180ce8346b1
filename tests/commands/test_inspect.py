"""`protlm inspect`: what it writes, and what it refuses before any work."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import protlm
from protlm.analysis.contact_regression import head_features, read_fit
from protlm.analysis.precision import precision
from protlm.analysis.structures import contact_map, read_structure
from protlm.commands.contacts import contacts
from protlm.commands.inspect import inspect
from protlm.options.look import ContactOptions, InspectOptions
from protlm.report import page
from protlm.system.errors import UserError
from tests.fixtures.commands import Command, run_page
from tests.fixtures.runs import Train
from tests.report.test_inspected_features import described
from tests.small_models import shortest_structures

SEQUENCE = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ"
(STRUCTURE,) = shortest_structures("test", 1)


@pytest.fixture(autouse=True)
def place(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a file of one protein, and a run."""
    monkeypatch.chdir(workplace)
    Path("x.fasta").write_text(f">P1 one\n{SEQUENCE}\n")


def write(source: Path = Path("x.fasta"), models: str = "run", **options: Any) -> dict[str, Any]:
    """Writes page.html and returns its data."""
    inspect(source, [*map(Path, models.split())], Path("page.html"), InspectOptions(**options))
    return content()


def content() -> dict[str, Any]:
    found = re.search(r'id="content">(.*?)</script>', Path("page.html").read_text("utf-8"))
    return json.loads(found[1])


def test_a_page_of_a_sequence(tmp_path: Path, protlm_in_process: Command) -> None:
    done = protlm_in_process("inspect", "x.fasta", "-m", "run", "-o", "page.html", cwd=tmp_path)
    assert done.stdout == "page.html\n" and re.search(r"the page has 0\.\d MB", done.stderr)
    page = content()
    assert page["protein"]["identifier"] == "P1"
    assert page["protein"]["source"] == "x.fasta"
    assert page["protein"]["structure"] is None
    [model] = page["models"]
    assert (model["name"], len(model["heads"])) == ("run", 4)
    assert model["hash"] == protlm.load("run").hash
    assert {head["bin"] for head in model["heads"]} == {1}
    assert len(model["predictions"]["probabilities"]) == 33
    # A page that is mailed does not tell where files were.
    text = Path("page.html").read_text(encoding="utf-8")
    assert str(tmp_path) not in text
    assert re.search("https?:", text) is None


def test_layers_heads_and_models_are_chosen(tmp_path: Path, protlm_in_process: Command) -> None:
    typed = "inspect x.fasta -m run -m run -o page.html --layers -1 --heads 2 1 --no-predictions"
    protlm_in_process(*typed.split(), cwd=tmp_path)
    for model in content()["models"]:
        assert [(head["layer"], head["head"]) for head in model["heads"]] == [(2, 1), (2, 2)]
        assert model["predictions"] is None


def test_predicted_contacts_are_those_of_the_fit() -> None:
    contacts([STRUCTURE], Path("run"), Path("c.h5"), ContactOptions())
    fit = Path("c.fit.json")
    [model] = write(STRUCTURE, fits=(fit,))["models"]
    structure = read_structure(STRUCTURE)
    stored = json.loads(fit.read_text())
    predicted = read_fit(fit).regression.predict(
        head_features(protlm.load("run"), structure.sequence)
    )
    assert model["contacts"]["map"]["scale"] == pytest.approx(predicted.max())
    hits, asked = precision(predicted, contact_map(structure), separation=(12, 24), divisor=2)
    row = {"range": "medium", "pairs": "P@L/2", "hits": hits, "asked": asked}
    assert row in model["contacts"]["precision"]
    Path("page.html").unlink()
    fit.write_text(json.dumps(stored | {"model_hash": "0" * 64}))
    with pytest.raises(UserError, match="was fitted to another model"):
        write(STRUCTURE, fits=(fit,))


def test_sparse_features_are_of_the_first_model(tmp_path: Path, protlm_in_process: Command) -> None:
    described(tmp_path, protlm.load("run"), {3: "helix"})
    words = "inspect x.fasta -m run -m run -o page.html --features sae --description names"
    protlm_in_process(*words.split(), "--no-predictions", cwd=tmp_path)
    first, second = (model["features"] for model in content()["models"])
    assert (first["layer"], first["listed"][0]["name"]["concept"]) == (1, "helix")
    assert second is None
    Path("page.html").unlink()
    with pytest.raises(UserError, match=r"--description .* needs --features SAE"):
        write(description=Path("names"))


def test_a_page_that_mail_does_not_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    words = r"the page has over .* MB, and mail takes .*select fewer heads .*omit both.*one model"
    # The maps of a layer, or the page.
    for limit, options in ((2_000, {"layers": (1,)}), (50_000, {})):
        monkeypatch.setattr(page, "MAX_BYTES", limit)
        with pytest.raises(UserError, match=words):
            write(**options)
    assert not Path("page.html").exists()


def test_maps_of_negative_weights_have_a_page(train_tiny: Train, tmp_path: Path) -> None:
    train_tiny(tmp_path / "other", "attention=nystromformer", "trainer.max_steps=2")
    [model] = write(models="other", predictions=False)["models"]
    assert np.any([head["map"]["signed"] for head in model["heads"]])
    assert "may be negative" in model["meaning"]


@pytest.mark.slow
def test_the_commands_of_the_page_run(workplace: Path, protlm_in_process: Command) -> None:
    (workplace / "protein.fasta").write_text(f">P1\n{SEQUENCE}\n")
    (workplace / "protein.pdb").write_bytes(gzip.decompress(STRUCTURE.read_bytes()))
    run_page("inspect.md", workplace, protlm_in_process, fewest=6)
