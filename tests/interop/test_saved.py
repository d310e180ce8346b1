"""What trainers save: encoders, classifiers, names with prefixes, checkpoints, adapters of PEFT."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import protlm
from protlm import interop
from protlm.config import HeadKind
from protlm.loading import model_of
from protlm.system.errors import InputDataError, UserError
from tests.interop.example import WIDTH, Tensors
from tests.interop.families import FAMILIES
from tests.interop.test_families import assert_same

WITH_HEAD = {"esm2": r"lm_head\.", "bert": r"cls\.", "esmc": r"lm_head\."}
WITH_HEAD |= {"nv_esm": r"lm_head\.", "e1": r"mlm_head\."}
ENCODER = {"esm2": "esm.", "bert": "bert.", "esmc": "esmc.", "nv_esm": "model.", "e1": "model."}
CLASSIFIER = {f"classifier.{x}": torch.ones(2) for x in ("dense.weight", "out_proj.bias")}
ESM = FAMILIES["esm2"]


def encoder(name: str, prefix: str | None = None) -> Tensors:
    """The tensors of an encoder, by the names of a model with a head or with another prefix."""
    own = ENCODER[name]
    kept = {n: v for n, v in FAMILIES[name].tensors().items() if not re.match(WITH_HEAD[name], n)}
    return {n.replace(own, own if prefix is None else prefix, 1): v for n, v in kept.items()}


@pytest.mark.parametrize("name", WITH_HEAD)
def test_an_encoder_is_the_model_without_its_head(name, tmp_path, capsys):
    whole = interop.read(FAMILIES[name].save(tmp_path / "whole")).weights
    body = {key: value for key, value in whole.items() if not key.startswith("head")}
    saved: dict[str, Tensors] = {
        "of a classifier": encoder(name) | CLASSIFIER,
        "bare": encoder(name, ""),
        "of a wrapped classifier": {
            f"module.{n}": v for n, v in {**encoder(name), **CLASSIFIER}.items()
        },
        "of Lightning": encoder(name, f"model.net.{ENCODER[name]}"),
        "bare of Lightning": encoder(name, "encoder_model."),
    }
    for kind, tensors in saved.items():
        capsys.readouterr()
        settings = {"architectures": ["Saved"], "tie_word_embeddings": False}
        found = interop.read(FAMILIES[name].save(tmp_path / kind, tensors, **settings))
        assert found.description.model.head is HeadKind.none
        assert (found.description.source or {})["class"] == "Saved"
        assert_same(found.weights, body)
        assert ("classifier.dense.weight" in capsys.readouterr().err) == ("classifier" in kind)
    model = model_of(found)
    with pytest.raises(UserError, match="encoder without an output layer"):
        print(model(model.tokenize(["MKV"])).logits_BLV)


@pytest.mark.parametrize("name", WITH_HEAD)
@pytest.mark.parametrize(
    "old, new", [("^", "_orig_mod."), (r"^(\w+)\.", r"model.\1._orig_mod."), ("^", "net.module.")]
)
def test_prefixes_of_programs_are_removed_from_a_whole_model(name, old, new, tmp_path):
    example = FAMILIES[name]
    tensors = {re.sub(old, new, n): v for n, v in example.tensors().items()}
    found = interop.read(example.save(tmp_path / "wrapped", tensors))
    assert_same(found.weights, interop.read(example.save(tmp_path / "whole")).weights)


@pytest.mark.parametrize(
    "further, message",
    [
        (
            encoder("esm2", "ema.esm."),
            r"the tensors of several models, which begin with 'ema.*'esm",
        ),
        ({"_orig_mod.lm_head.bias": torch.zeros(33)}, "the tensors of several models"),
        ({"loss.weight": torch.zeros(3)}, r"has 1 tensor .'loss.weight'. that its architecture"),
    ],
)
def test_no_prefix_is_guessed(further, message, tmp_path):
    with pytest.raises(InputDataError, match=message):
        interop.read(ESM.save(tmp_path / "esm", {**ESM.tensors(), **further}))


def test_checkpoints_of_lightning_are_read_beside_settings(tmp_path, capsys):
    folder = ESM.save(tmp_path / "run")
    whole = interop.read(folder).weights
    state = {f"model.{n}": v for n, v in ESM.tensors().items()}
    contents: dict[str, Any] = {"state_dict": state, "hyper_parameters": {"lr": 1.0}, "epoch": 3}
    for name, kept in (("last.ckpt", contents), ("model.pt", state)):
        torch.save(kept, folder / name)
        assert interop.is_foreign(folder / name)
        assert_same(interop.read(folder / name).weights, whole)
    assert "averages" not in capsys.readouterr().err
    torch.save({**contents, "ema_state_dict": state}, folder / "last.ckpt")
    assert_same(interop.read(folder / "last.ckpt").weights, whole)
    assert "left out averages of the weights: ema_state_dict" in capsys.readouterr().err
    (folder / "config.json").unlink()
    with pytest.raises(InputDataError, match=r"put the config.json of the model that was trained"):
        protlm.load(folder / "last.ckpt")
    torch.save({**contents, "hyper_parameters": argparse.Namespace(lr=1)}, folder / "bad.ckpt")
    with pytest.raises(InputDataError, match=r"call argparse.Namespace.*torch.save\(state"):
        protlm.load(folder / "bad.ckpt")


def test_dplm_has_no_contact_head(tmp_path, capsys):
    assert interop.read(ESM.save(tmp_path / "esm")).contacts is not None
    table = {"esm.embeddings.position_embeddings.weight": torch.zeros(66, WIDTH)}
    found = interop.read(ESM.save(tmp_path / "dplm", ESM.tensors() | table, dplm_type="dplm_esm"))
    assert found.contacts is None and "untrained in DPLM" in capsys.readouterr().err


R, ALPHA = 3, 6
QUERY = "esm.encoder.layer.1.attention.self.query"
EMBEDDING = "esm.embeddings.word_embeddings"


def write_adapter(folder: Path, tensors: Tensors, **settings: Any) -> Path:
    folder.mkdir()
    config = {"peft_type": "LORA", "r": R, "lora_alpha": ALPHA, "init_lora_weights": True}
    (folder / "adapter_config.json").write_text(json.dumps({**config, **settings}))
    named = {f"base_model.model.{name}": value.contiguous() for name, value in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    return folder


def pair(module: str, rows: int, scale: float = 1.0, rank: int = R) -> Tensors:
    generator = torch.Generator().manual_seed(len(module))
    a, b = (torch.randn(n, generator=generator).double() for n in (rank * WIDTH, rows * rank))
    parts = {"lora_A.weight": a.view(rank, WIDTH), "lora_B.weight": b.view(rows, rank) * scale}
    return {f"{module}.{part}": value for part, value in parts.items()}


@pytest.mark.parametrize(
    "settings, rank, scale",
    [
        ({}, R, 2.0),
        ({"use_rslora": True}, R, ALPHA / R**0.5),
        ({"alpha_pattern": {"layer.1.attention.self.query": 12}, "r": 8}, R, 4.0),
        ({"rank_pattern": {"query": 2}}, 2, 3.0),
    ],
)
@pytest.mark.parametrize("module", [QUERY, QUERY.removeprefix("esm.")])
def test_adapters_are_merged(settings, rank, scale, module, tmp_path, capsys):
    base = ESM.save(tmp_path / "base")
    changes = pair(module, WIDTH, rank=rank)
    whole = {f"{module}.bias": torch.arange(WIDTH).double(), **CLASSIFIER}
    settings = {**settings, "base_model_name_or_path": str(base)}
    adapter = write_adapter(tmp_path / "adapter", changes | whole, **settings)
    tensors = ESM.tensors()
    a, b = changes.values()
    tensors[f"{QUERY}.weight"] += scale * b @ a
    tensors[f"{QUERY}.bias"] = torch.arange(WIDTH).double()
    expected, found = interop.read(ESM.save(tmp_path / "x", tensors)), interop.read(adapter)
    torch.testing.assert_close(found.weights, expected.weights, rtol=0, atol=1e-12)
    changed, unchanged = (
        x.weights["blocks.1.attention.query.weight"] for x in (found, interop.read(base))
    )
    assert not changed.equal(unchanged) and "adapter_sha256" in (found.description.source or {})
    assert "left out 2 tensors ('classifier.dense.weight', " in capsys.readouterr().err
    zero = write_adapter(tmp_path / "zero", pair(module, WIDTH, 0.0))
    assert_same(interop.read(zero, base).weights, interop.read(base).weights)


def test_an_embedding_has_its_own_form(tmp_path):
    a, b = torch.randn(R, 33).double(), torch.randn(WIDTH, R).double()
    parts = {f"{EMBEDDING}.lora_embedding_A": a, f"{EMBEDDING}.lora_embedding_B": b}
    adapter = write_adapter(tmp_path / "adapter", parts)
    with pytest.raises(InputDataError, match="tied to its output layer"):
        interop.read(adapter, ESM.save(tmp_path / "whole"))
    base = ESM.save(tmp_path / "base", encoder("esm2"))
    found, before = interop.read(adapter, base).weights, interop.read(base).weights
    expected_VD = before["embedding.weight"] + 2 * (b @ a).T
    torch.testing.assert_close(found["embedding.weight"], expected_VD, rtol=0, atol=1e-12)


MISFIT = "give the base that it was trained on"


@pytest.mark.parametrize(
    "tensors, settings, message",
    [
        ({}, {"peft_type": "IA3"}, "peft_type='IA3' is not supported; merge it by PEFT"),
        ({}, {"use_dora": True}, "use_dora=True"),
        ({}, {"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
        ({}, {"fan_in_fan_out": True}, "fan_in_fan_out=True"),
        ({}, {}, "to None, which is not a model here; give its base"),
        (pair("esm.other", WIDTH), {}, f"'esm.other.weight', .*{MISFIT}"),
        (pair(QUERY, 5), {}, MISFIT),
        ({f"{QUERY}.lora_A.weight": torch.zeros(R, WIDTH)}, {}, MISFIT),
        ({f"{QUERY}.bias": torch.zeros(3)}, {}, MISFIT),
        ({"other.weight": torch.zeros(3)}, {}, "that its architecture does not have"),
    ],
)
def test_other_adapters_are_refused(tensors, settings, message, tmp_path):
    base = ESM.save(tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", tensors or pair(QUERY, WIDTH), **settings)
    with pytest.raises(InputDataError, match=message):
        interop.read(adapter, None if "None" in message else base)
    with pytest.raises(UserError, match="is not one"):
        interop.read(base, base)
