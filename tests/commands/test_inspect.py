"""`protlm inspect`: what it writes, and what it refuses before any work."""

import gzip
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import protlm
from protlm.analysis.contact_regression import ContactRegression, head_features
from protlm.analysis.precision import precision
from protlm.analysis.structures import contact_map, read_structure
from protlm.commands.contacts import ContactOptions, contacts
from protlm.commands.inspect import InspectOptions, inspect
from protlm.report.plan import plan_page
from protlm.system.errors import InputDataError, OutputError, UserError
from protlm.system.paths import sample_dir

ROOT = Path(__file__).resolve().parents[2]
SEQUENCE = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ"
STRUCTURE = min(
    (sample_dir() / "structures" / "test").glob("*.gz"), key=lambda path: path.stat().st_size
)
Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    """A file of one protein."""
    path = tmp_path / "x.fasta"
    path.write_text(f">P1 one\n{SEQUENCE}\n")
    return path


def content(page: Path) -> dict[str, Any]:
    """The data of a page."""
    found = re.search(r'id="content">(.*?)</script>', page.read_text(encoding="utf-8"))
    assert found is not None
    return json.loads(found[1])


def test_a_page_of_a_sequence(workplace: Path, protlm_in_process: Command) -> None:
    done = protlm_in_process("inspect", "x.fasta", "-m", "run", "-o", "page.html", cwd=workplace)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"page\.html: 0\.\d MB\n", done.stdout)
    page = content(workplace / "page.html")
    assert page["protein"]["identifier"] == "P1"
    assert page["protein"]["source"] == "x.fasta"
    assert page["protein"]["structure"] is None
    [model] = page["models"]
    assert (model["name"], len(model["heads"])) == ("run", 4)
    assert model["hash"] == protlm.load(workplace / "run").hash
    assert {head["bin"] for head in model["heads"]} == {1}
    assert len(model["predictions"]["probabilities"]) == 22
    assert (workplace / "page.html").stat().st_size <= plan_page(
        22, [4], is_selection=False
    ).num_bytes
    # A page that is mailed does not tell where files were.
    assert str(workplace) not in (workplace / "page.html").read_text(encoding="utf-8")
    assert re.search("https?:", (workplace / "page.html").read_text(encoding="utf-8")) is None


def test_layers_heads_and_models_are_chosen(workplace: Path, protlm_in_process: Command) -> None:
    chosen = ["--layers", "-1", "--heads", "2", "1", "--no-predictions"]
    models = ["-m", "run", "-m", "run"]
    done = protlm_in_process(
        "inspect", "x.fasta", *models, "-o", "page.html", *chosen, cwd=workplace
    )
    assert done.returncode == 0, done.stderr
    for model in content(workplace / "page.html")["models"]:
        assert [(head["layer"], head["head"]) for head in model["heads"]] == [(2, 1), (2, 2)]
        assert model["predictions"] is None


def test_predicted_contacts_are_those_of_the_fit(tiny_run: Path, tmp_path: Path) -> None:
    contacts([STRUCTURE], tiny_run, tmp_path / "c.h5", ContactOptions())
    fit = tmp_path / "c.fit.json"
    inspect(STRUCTURE, [tiny_run], tmp_path / "page.html", InspectOptions(fits=(fit,)))
    [model] = content(tmp_path / "page.html")["models"]
    structure = read_structure(STRUCTURE)
    regression = ContactRegression.from_dict(json.loads(fit.read_text()))
    predicted = regression.predict(head_features(protlm.load(tiny_run), structure.sequence))
    assert model["contacts"]["map"]["scale"] == pytest.approx(predicted.max())
    hits, asked = precision(predicted, contact_map(structure), separation=(12, 24), divisor=2)
    row = {"range": "medium", "pairs": "P@L/2", "hits": hits, "asked": asked}
    assert row in model["contacts"]["precision"]
    plan = plan_page(len(structure), [4], is_selection=False, num_contact_maps=1)
    # Without the page's own text the estimate is that of the data, and not much larger.
    size, fixed = (tmp_path / "page.html").stat().st_size, 200_000
    assert 0.5 * (plan.num_bytes - fixed) < size <= plan.num_bytes
    stored = json.loads(fit.read_text())
    fit.write_text(json.dumps(stored | {"model_hash": "0" * 64}))
    with pytest.raises(UserError, match="was fitted to another model"):
        inspect(STRUCTURE, [tiny_run], tmp_path / "other.html", InspectOptions(fits=(fit,)))


@pytest.mark.parametrize(
    ("output", "options", "message"),
    [
        ("page.h5", InspectOptions(), r"is an HTML page; type: -o page\.html"),
        ("page.html", InspectOptions(layers=(3,)), "layer 3 does not exist"),
        ("page.html", InspectOptions(heads=(3,)), "head 3 does not exist"),
        ("page.html", InspectOptions(chain="A"), "--chain A is for a PDB or mmCIF file"),
    ],
)
def test_wrong_options_are_refused(
    output: str, options: InspectOptions, message: str, fasta: Path, tiny_run: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        inspect(fasta, [tiny_run], tmp_path / output, options)
    assert list(tmp_path.iterdir()) == [fasta]


def test_three_models_two_proteins_and_an_old_page_are_refused(
    fasta: Path, tiny_run: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    with pytest.raises(UserError, match="compares two models, and 3 are given"):
        inspect(fasta, [tiny_run] * 3, page, InspectOptions())
    fasta.write_text(f">P1\n{SEQUENCE}\n>P2\n{SEQUENCE}\n")
    with pytest.raises(InputDataError, match="has 2 proteins, and a page shows one"):
        inspect(fasta, [tiny_run], page, InspectOptions())
    page.write_text("mine")
    with pytest.raises(OutputError, match="exists already"):
        inspect(fasta, [tiny_run], page, InspectOptions())
    assert page.read_text() == "mine"


def test_titin_is_refused_before_the_work(fasta: Path, tiny_run: Path, tmp_path: Path) -> None:
    fasta.write_text(f">P1\n{SEQUENCE * 1_067}\n")
    with pytest.raises(UserError, match=r"35,211 residues, and a page shows at most 2,048"):
        inspect(fasta, [tiny_run], tmp_path / "page.html", InspectOptions())
    assert list(tmp_path.iterdir()) == [fasta]


def test_maps_of_negative_weights_have_a_page(
    fasta: Path, train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    run = train_tiny(tmp_path / "run", "attention=nystromformer", "trainer.max_steps=2")
    inspect(fasta, [run], tmp_path / "page.html", InspectOptions(predictions=False))
    [model] = content(tmp_path / "page.html")["models"]
    assert np.any([head["map"]["signed"] for head in model["heads"]])
    assert "may be negative" in model["meaning"]


def test_the_commands_of_the_page_run(workplace: Path, protlm_in_process: Command) -> None:
    """All commands of docs/inspect.md, with the files that it names."""
    page = (ROOT / "docs" / "inspect.md").read_text()
    (workplace / "protein.fasta").write_text(f">P1\n{SEQUENCE}\n")
    (workplace / "protein.pdb").write_bytes(gzip.decompress(STRUCTURE.read_bytes()))
    (workplace / "runs").mkdir()
    (workplace / "runs" / "mine").symlink_to(workplace / "run")
    blocks = re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    commands = "".join(blocks).splitlines()
    assert len(commands) >= 6
    for command in commands:
        typed = command.split("#")[0].split()
        assert typed[0] == "protlm"
        done = protlm_in_process(*typed[1:], cwd=workplace)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        assert (workplace / typed[typed.index("-o") + 1]).exists()
