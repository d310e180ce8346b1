"""Checkpoints: what was written, or an error by name; shipped models are as their cards say."""

import json
import random
from pathlib import Path

import h5py
import pytest
import torch

import protlm
from protlm.checkpoints import format as checkpoints
from protlm.checkpoints.checks import check_weights
from protlm.checkpoints.format import (
    CARD,
    RESULTS,
    WEIGHTS,
    default_model,
    find_model,
    shipped_models,
    weights_hash,
)
from protlm.commands.checkpoint import export
from protlm.model.selfattention import HEADS_OF_RELATIVES
from protlm.model.transformer import num_parameters
from protlm.system.errors import InputDataError, OutputError
from protlm.system.paths import sample_dir

SPLIT = "test_remote_homolog"


@pytest.fixture
def models(tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of shipped models: `second`, then `first`, and one without a card."""
    folder = tmp_path / "models"
    for name in ("second", "first", "unfinished"):
        export(tiny_run, folder / name)
        if name != "unfinished":
            (folder / name / CARD).write_text(f"# {name}\n")
    monkeypatch.setattr(checkpoints, "shipped", lambda name: folder)
    monkeypatch.setattr(checkpoints, "DEFAULT", "second")
    return folder


def test_models_are_found_by_name(models):
    assert shipped_models() == [models / "first", models / "second"]
    assert find_model(Path("second")) == models / "second"
    assert find_model(Path("unfinished")) == Path("unfinished")
    assert protlm.load("first").hash == protlm.load(models / "second").hash


def test_a_folder_of_the_same_name_comes_first(models, tmp_path, monkeypatch):
    (tmp_path / "work" / "first").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    assert find_model(Path("first")) == Path("first")
    with pytest.raises(InputDataError, match="first is not a model"):
        protlm.load("first")


def test_without_models_the_user_has_to_name_one(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "shipped", lambda name: tmp_path)
    for path in ("first", default_model()):
        with pytest.raises(InputDataError, match=r"no such model.*protlm models"):
            protlm.load(path)


def test_an_export_in_bfloat16_is_half_as_large_and_rounded_once(tiny_run, tmp_path, train):
    run = train("run", "attention=performer_softmax", "model.qk_norm=true")
    export(run, tmp_path / "whole")
    export(run, tmp_path / "half", "bfloat16")
    export(tmp_path / "half", tmp_path / "again", "bfloat16")
    whole, half, again = (
        checkpoints.read(tmp_path / name).weights for name in ("whole", "half", "again")
    )
    parameters = {name for name, _ in protlm.load(run).network.named_parameters()}
    assert parameters < set(whole)
    for name, value in whole.items():
        assert half[name].dtype == (torch.bfloat16 if name in parameters else value.dtype)
        assert torch.equal(half[name], value.to(half[name].dtype))
        assert torch.equal(again[name], half[name])
    loaded = protlm.load(tmp_path / "half").network.state_dict()
    assert all(torch.equal(loaded[name], half[name].to(loaded[name].dtype)) for name in loaded)


@pytest.fixture(scope="module", params=shipped_models(), ids=lambda folder: folder.name)
def folder(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture(scope="module")
def results(folder: Path) -> dict:
    return json.loads((folder / RESULTS).read_text())


def test_the_weights_are_small_and_those_of_the_results(folder, results):
    model, size = protlm.load(folder.name), (folder / WEIGHTS).stat().st_size
    assert size <= 14e6 and size < 2.02 * num_parameters(model.network)
    # Reports are of proteins alone, and were made before the model had heads of relatives.
    weights = model.network.state_dict().items()
    own = {name: x for name, x in weights if HEADS_OF_RELATIVES not in name}
    assert {report["model_hash"] for report in results.values()} == {weights_hash(own)}
    # The identity of the others does not change with settings that they do not use.
    described = json.dumps(model.description.to_plain())
    assert ("relatives" in described) == (folder == default_model())


@pytest.mark.parametrize("name", ["sample", "swissprot50"])
def test_the_card_prints_the_results(folder, results, name):
    title = {"sample": "### Splits of the shipped sample", "swissprot50": "### Swiss-Prot"}[name]
    section = (folder / CARD).read_text().split(title)[1].split("\n#")[0]
    for split, found in results[name]["results"].items():
        for who in ("model", "empirical", "three_mers"):
            figures = found["masked"][who]
            row = f"| {split} | {who} | {figures['accuracy']:.2%} | {figures['perplexity']:.2f} |"
            assert row in section


def test_the_card_prints_the_families(folder, results):
    card = (folder / CARD).read_text()
    for name in ("sample_families", "swissprot50_families"):
        found = results[name]["results"]["test_ood_family"]["masked"]
        for family, group in found["by_group"].items():
            figures = [f"{group[who]['perplexity']:.2f}" for who in ("model", "empirical")]
            cells = " | ".join([f"{group['sequences']:,}", *figures])
            (row,) = [line for line in card.splitlines() if line.startswith(f"| {family} |")]
            assert f"| {cells} |" in row
        low, high = found["interval"]["perplexity"]
        assert f"| {low:.2f} to {high:.2f} |" in card
        assert f"{found['macro']['model']['perplexity']:.2f}" in card


def test_the_card_prints_what_probes_and_contacts_give(folder, results):
    card = (folder / CARD).read_text()
    states = results["secondary_structure"]["results"]["any"]["secondary_structure"]["predictors"]
    both = ("model", "random_weights")
    contacts = results["contacts"]["results"]["any"]["contacts"]
    rows = {"secondary structure": [states[who]["metrics"]["accuracy"]["value"] for who in both]}
    if labels := results.get("location", {}).get("predictors"):
        found = [labels[who]["metrics"]["accuracy"]["value"] for who in both]
        rows["subcellular location"] = found
    for separation in ("short", "medium", "long"):
        found = [contacts[who][separation]["P@L"]["mean"] for who in both]
        rows[f"{separation} range"] = found
    for name, figures in rows.items():
        (row,) = [line for line in card.splitlines() if line.startswith("| ") and name in line]
        shown = [cell.partition(" %")[0] for cell in row.split(" | ")[1:3]]
        assert shown == [f"{100 * figure:.1f}" for figure in figures]


@pytest.mark.parametrize("typed", [[], ["--relatives", sample_dir() / "uniprot_tiny.fasta.gz"]])
def test_commands_use_the_default_and_say_so(protlm_in_process, tmp_path, typed):
    protein = sample_dir() / "bpt1_bovin.fasta"
    done = protlm_in_process("embed", protein, "-o", tmp_path / "x.h5", *typed, cwd=tmp_path)
    assert f"model: {default_model().name}, shipped with protlm" in done.stderr
    width = protlm.load(default_model().name).description.model.model_dim
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["P00974"].shape == (width,)


def test_models_lists_them_all_and_names_the_default(protlm_in_process, tmp_path, folder, results):
    listed = protlm_in_process("models", cwd=tmp_path).stdout
    figures = results["sample"]["results"]["test_iid"]["masked"]["model"]
    assert f"{figures['perplexity']:.2f}" in listed and folder.name in listed
    name = default_model().name
    assert f"These read relatives, too: {name}.\nWithout -m, commands use {name}." in listed


@pytest.mark.slow
def test_an_evaluation_reproduces_the_card(protlm_in_process, tmp_path):
    """Of the default model; the hash of the weights binds the others to their results."""
    results = json.loads((default_model() / RESULTS).read_text())
    sample = sample_dir() / "uniprot_sample"
    table = ["--split-table", f"{sample}.splits.tsv.gz"]
    protlm_in_process("prepare", f"{sample}.fasta.gz", "--out", "d", *table, cwd=tmp_path)
    settings = ["data.dir=d", f"split={SPLIT}", "evaluation.masked.max_length=512"]
    settings.append(f"checkpoint={default_model().name}")
    protlm_in_process("evaluate", *settings, "output=o.json", cwd=tmp_path)
    found = json.loads((tmp_path / "o.json").read_text())["results"][SPLIT]["masked"]
    expected = results["sample"]["results"][SPLIT]["masked"]
    assert found["targets"] == expected["targets"]
    for who in ("model", "empirical", "three_mers"):
        for figure, digits in (("perplexity", 2), ("accuracy", 3)):
            assert f"{found[who][figure]:.{digits}f}" == f"{expected[who][figure]:.{digits}f}"


def test_a_run_a_checkpoint_and_an_export_are_one_model(tiny_run, exported):
    models = [
        protlm.load(path)
        for path in (tiny_run, max(checkpoints.all_checkpoints(tiny_run)), exported)
    ]
    assert len({model.hash for model in models}) == 1
    logits = [model(model.tokenize(["MKTAYIAKQR"])).logits_BLV for model in models]
    assert logits[0].equal(logits[1]) and logits[0].equal(logits[2])


def flipped(whole: bytes, rng: random.Random) -> bytes:
    changed = bytearray(whole)
    changed[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
    return bytes(changed)


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_every_flipped_bit_and_truncation_of_an_export_is_rejected_by_name(name, exported):
    path, rng = exported / name, random.Random(0)
    whole = path.read_bytes()
    bits = [flipped(whole, rng) for _ in range(20)]
    for contents in (*bits, whole[:-1], whole[: len(whole) // 2], b""):
        path.write_bytes(contents)
        with pytest.raises(InputDataError, match=name):
            protlm.load(exported)


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path):
    """An expanded tensor claims terabytes in a small file, and raises the limit of memory."""
    torch.save({"weight": torch.zeros(1).expand(1 << 20, 1 << 20)}, tmp_path / "x.bin")
    weights = torch.load(tmp_path / "x.bin", weights_only=True)
    with pytest.raises(InputDataError, match="'weight' has more numbers than are stored for it"):
        check_weights(tmp_path / "x.bin", weights)
    for whole in (torch.zeros(3, 2).T, torch.zeros(6)[2:], torch.zeros(0, 4)):
        assert check_weights(tmp_path, {"weight": whole})["weight"] is whole


def test_an_export_over_another_is_refused(tiny_run, exported):
    with pytest.raises(OutputError, match="exists already"):
        checkpoints.export(checkpoints.read(tiny_run), exported)


def test_a_folder_without_a_model_is_rejected_with_advice(tmp_path):
    with pytest.raises(InputDataError, match=r"a run folder, a \.ckpt file or an exported folder"):
        protlm.load(tmp_path)
