"""The commands on a foreign model, as it is and imported, and those of docs/interop.md."""

import json
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

import protlm
from protlm import interop
from protlm.checkpoints.description import ModelDescription
from protlm.commands import checkpoint
from protlm.data.vocabulary import STANDARD
from protlm.system.errors import InputDataError
from protlm.system.paths import sha256_of
from tests.fixtures.commands import ROOT, SHORT_TRAINING, Command, commands_of
from tests.interop.example import WIDTH
from tests.interop.families import ESM, FAIR_ESM, FAMILIES
from tests.interop.test_families import assert_same
from tests.interop.test_saved import QUERY, pair, write_adapter
from tests.small_models import shortest_structures, structure_folder


@pytest.fixture
def succeed(protlm_in_process: Command, tmp_path: Path) -> Callable[..., str]:
    """Runs a command in the folder of the test; returns what it prints."""
    return lambda *arguments: protlm_in_process(*arguments, cwd=tmp_path).stdout


def test_the_commands_take_an_imported_esm_2(succeed, tmp_path):
    foreign = ESM.save(tmp_path / "esm")
    succeed("checkpoint", "import", foreign, "-o", "esm2")
    imported = tmp_path / "esm2"
    succeed("checkpoint", "verify", "esm2")
    assert protlm.load(imported).hash == protlm.load(foreign).hash
    printed = succeed("checkpoint", "info", "esm2")
    assert f"source.sha256              {sha256_of(foreign / 'model.safetensors')}" in printed
    assert "source.family              esm" in printed
    fasta = tmp_path / "x.fasta"
    fasta.write_text(">P1\nMKTAYIAKQRQISFVKSHFSRQ\n>P2\nMKXU\n")
    vectors = []
    for name, model in (("imported", "esm2"), ("foreign", foreign)):
        succeed("embed", fasta, "-m", model, "-o", f"{name}.h5")
        with h5py.File(tmp_path / f"{name}.h5") as file:
            vectors.append(file["P1"][:])
    np.testing.assert_array_equal(*vectors)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["e1", "nv_esm"])
def test_the_commands_take_other_models(name, succeed, tmp_path):
    example, sequence = FAMILIES[name], "MKTAYIAKQRQISFVKSHFSRQ"
    example.save(tmp_path / "m")
    (tmp_path / "x.fasta").write_text(f">P\n{sequence}\n")
    split = ("train", "train", "valid", "test") * 5
    rows = [f"{n}\tMK{x}LV\t{n % 2}.5\t{split[n]}\n" for n, x in enumerate(STANDARD)]
    (tmp_path / "l.tsv").write_text("id\tsequence\tlabel\tsplit\n" + "".join(rows))
    structure_folder(tmp_path, "fit", 1)
    model = ("-m", "m", "-o")
    succeed("embed", "x.fasta", *model, "e.h5", "--include", "mean", "per_tok")
    succeed("attention", "x.fasta", *model, "a.h5")
    succeed("contacts", "x.fasta", *model, "c.h5", "--fit", "fit")
    succeed("probe", "l.tsv", *model, "probe")
    succeed("finetune", "l.tsv", *model, "tuned", "--epochs", "1")
    succeed("inspect", "x.fasta", *model, "x.html")
    assert (tmp_path / "x.html").stat().st_size > 10_000


def test_an_import_that_fails_leaves_nothing(protlm_in_process, tiny_run, tmp_path):
    for source, message in (
        (
            ESM.save(tmp_path / "other", model_type="gpt2"),
            "is a model of the type 'gpt2'; protlm reads: ablang",
        ),
        (tiny_run, "is not a model of another program: give a Hugging Face folder"),
        (tmp_path / "missing.pt", "missing.pt: no such file"),
    ):
        before = sorted(tmp_path.iterdir())
        typed = ["checkpoint", "import", source, "-o", "new"]
        done = protlm_in_process(*typed, cwd=tmp_path, code=3)
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert sorted(tmp_path.iterdir()) == before
    source = ESM.save(tmp_path / "esm")
    done = protlm_in_process("checkpoint", "import", source, "-o", source, cwd=tmp_path, code=4)
    assert "exists already" in done.stderr


def test_an_interrupted_import_leaves_no_contact_head(tmp_path, monkeypatch):
    def interrupted(*_: object) -> None:
        assert (tmp_path / "new.fit.json").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.checkpoints, "export", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.import_model(ESM.save(tmp_path / "esm"), tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["esm"]


@pytest.mark.parametrize("source", [3, {"family": "esm", "sha256": 1}])
def test_an_impossible_source_in_a_description_is_refused(source, tmp_path):
    plain = protlm.load(ESM.save(tmp_path / "esm")).description.to_plain()
    assert ModelDescription.parse(tmp_path, plain).to_plain() == plain
    with pytest.raises(InputDataError, match=r"source.* must be an? "):
        ModelDescription.parse(tmp_path, plain | {"source": source})


@pytest.mark.peers
def test_an_esm_is_exported_whole_and_imported_again(succeed, tmp_path):
    from transformers import EsmForMaskedLM

    foreign = ESM.save(tmp_path / "esm", tensors={n: v.float() for n, v in ESM.tensors().items()})
    succeed("checkpoint", "import", foreign, "-o", "esm2")
    succeed("checkpoint", "export", "esm2", "--format", "hf", "--fit", "esm2.fit.json", "-o", "hf")
    succeed("checkpoint", "import", "hf", "-o", "again")
    expected, found = (interop.read(path) for path in (foreign, tmp_path / "hf"))
    assert found.contacts == expected.contacts
    assert protlm.load(tmp_path / "again").hash == protlm.load(foreign).hash
    # Nothing is missing, and transformers names what it saves in another way.
    peer, info = EsmForMaskedLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info.values()), info
    peer.save_pretrained(tmp_path / "saved")
    assert_same(interop.read(tmp_path / "saved").weights, expected.weights)


def test_a_run_is_exported_for_transformers_and_imported_again(succeed, tiny_run, tmp_path):
    succeed("checkpoint", "export", tiny_run, "--format", "hf", "-o", "hf")
    succeed("checkpoint", "import", "hf", "-o", "again")
    original, found = protlm.load(tiny_run), protlm.load(tmp_path / "again")
    assert (found.hash, found.description) == (original.hash, original.description)
    assert protlm.load(tmp_path / "hf").hash == original.hash
    files = {path.name for path in (tmp_path / "hf").iterdir()}
    assert {"config.json", "model.safetensors", "modeling_protlm.py", "tokenizer.json"} <= files
    settings = json.loads((tmp_path / "hf" / "config.json").read_text())
    del settings["protlm"]["model"]["num_heads"]
    (tmp_path / "hf" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(InputDataError, match=r"config\.json is not a model .*num_heads is missing"):
        protlm.load(tmp_path / "hf")


@pytest.mark.parametrize(
    "options, message",
    [
        (["--format", "tf"], "--format tf is not one of protlm, hf, onnx"),
        (["--format", "hf", "--dtype", "bfloat16"], "--dtype bfloat16 needs --format protlm"),
        (["--fit", "x.json"], "--fit x.json needs --format hf"),
        (["--format", "hf", "--fit", "fit.json"], "needs a model with the architecture of ESM"),
        (["--format", "hf", "--fit", "fit.json"], "was fitted with another model"),
    ],
)
def test_impossible_exports_are_refused(options, message, protlm_in_process, tiny_run, tmp_path):
    fit = {"model_hash": "x", "seed": 0, "weights": [1.0], "intercept": 0.0}
    (tmp_path / "fit.json").write_text(json.dumps(fit))
    model = ESM.save(tmp_path / "esm") if "another model" in message else tiny_run
    typed = ["checkpoint", "export", model, "-o", "new", *options]
    assert message in protlm_in_process(*typed, cwd=tmp_path, code=2).stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.peers
def test_the_commands_of_the_document(succeed, tiny_data, tiny_run, tmp_path):
    from transformers import EsmConfig, EsmForMaskedLM

    sizes = {"hidden_size": 320, "num_hidden_layers": 6, "intermediate_size": 1280}
    config = EsmConfig(**{**ESM.settings, **sizes, "num_attention_heads": 20})
    EsmForMaskedLM(config).save_pretrained(tmp_path / "esm2_t6_8M_UR50D")
    ESM.save(tmp_path / "esm2_t33_650M_UR50D")
    FAIR_ESM.save(tmp_path / "fair").rename(tmp_path / "esm2_t33_650M_UR50D.pt")
    # With a folder of its owner, a name of the Hub is a local path.
    (tmp_path / "facebook").mkdir()
    (tmp_path / "facebook" / "esm2_t33_650M_UR50D").symlink_to(tmp_path / "esm2_t33_650M_UR50D")
    write_adapter(tmp_path / "adapter", pair(QUERY, WIDTH))
    for folder in ("data", "runs", "models"):
        (tmp_path / folder).mkdir()
    for name in ("mine", "family"):
        (tmp_path / "data" / name).symlink_to(tiny_data)
    (tmp_path / "runs" / "mine").symlink_to(tiny_run)
    for name in ("proteins.fasta", "protein.fasta"):
        (tmp_path / name).write_text(">P1\nMKTAYIAKQRQISFVKSHFSRQ\n>P2\nMKXU\n")
    (smallest,) = shortest_structures("fit", 1)
    (tmp_path / smallest.name).write_bytes(smallest.read_bytes())
    # The layers of the tiny model, and the format of the shipped structures.
    ours = {"33": "2", "protein.pdb": smallest.name}
    short = {"train": SHORT_TRAINING, "evaluate": ["evaluation.contacts.max_residues=120"]}
    for program, *named in commands_of(ROOT / "docs" / "interop.md"):
        if program == "pip":
            continue
        assert program == "protlm"
        words = [ours.get(word, word) for word in named]
        (tmp_path / "embeddings.h5").unlink(missing_ok=True)
        succeed(*words, *short.get(words[0], ()))
    assert (tmp_path / "exported" / "modeling_protlm.py").is_file()
    assert not list((tmp_path / "esm2").glob("*.py"))
    assert protlm.load(tmp_path / "models" / "again").hash == protlm.load(tiny_run).hash
    assert protlm.load(tmp_path / "runs" / "family").description.source is not None
