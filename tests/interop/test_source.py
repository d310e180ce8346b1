"""Files of foreign models: which are recognized, and which are refused."""

import argparse
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import protlm
from protlm import interop
from protlm.checkpoints.format import weights_hash
from protlm.system.errors import InputDataError
from tests.interop.families import ESM, FAMILIES

Write = Callable[..., Path]


class Malicious:
    """Unpickling it creates a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.canary}",)


def test_protlm_s_own_models_are_not_foreign(tiny_run, tmp_path):
    assert not interop.is_foreign(tiny_run)
    assert not interop.is_foreign(tmp_path / "missing")
    assert not interop.is_foreign(tmp_path / "step-00000001.ckpt")


@pytest.mark.parametrize("form", ["esm2.pt", "folder"])
def test_code_in_a_pickle_does_not_run(form, tmp_path, write_esm):
    canary, bad = tmp_path / "canary", Malicious(tmp_path / "canary")
    for contents in (bad, {"model": bad}, {"cfg": {"model": bad}, "model": {}}):
        path = tmp_path / "esm2.pt"
        target = path
        if form == "folder":
            path = write_esm(f"esm{len(list(tmp_path.iterdir()))}")
            (path / "model.safetensors").unlink()
            target = path / "pytorch_model.bin"
        torch.save(contents, target)
        with pytest.raises(InputDataError, match=r"refused: it would call .*system"):
            interop.read(path)
        # torch would warn of the protocols that it does not know.
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            target.write_bytes(pickle.dumps(contents, protocol))
            with pytest.raises(InputDataError, match=r" is (refused|not a file of tensors as)"):
                interop.read(path)
    assert not canary.exists()


@pytest.mark.parametrize(
    "contents, message",
    [
        ({}, "is neither an ESM-2, ESM-1b or ESM-1v of fair-esm"),
        ({"args": {}, "model": ESM.tensors()}, "is neither an ESM-2, ESM-1b or ESM-1v of fair-esm"),
        (
            {"args": argparse.Namespace(arch="msa_transformer"), "model": ESM.tensors()},
            "arch='msa_transformer', such as ESM-1 or MSA Transformer, which protlm does not read",
        ),
        ([1], "it contains a list"),
        ({"cfg": {"model": Path("x")}, "model": {}}, "refused: it would call pathlib"),
    ],
)
def test_other_files_are_refused(contents, message, tmp_path):
    torch.save(contents, tmp_path / "x.pt")
    with pytest.raises(InputDataError, match=message):
        interop.read(tmp_path / "x.pt")


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_missing_and_damaged_files_are_named(name, tmp_path):
    path = tmp_path / name
    with pytest.raises(InputDataError, match=f"{name}: no such file"):
        interop.read(path)
    path.write_bytes(b"\x80nonsense" * 50)
    path.with_suffix(".json").write_text('{"architecture": {"family": "RoBERTa"}}')
    with pytest.raises(InputDataError, match=f"{name} is not a file of"):
        interop.read(path)


def test_a_file_is_the_one_that_its_description_names(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(2)}, path)
    described = {"architecture": {"family": "RoBERTa"}, "weights_sha256": "0" * 64}
    path.with_suffix(".json").write_text(json.dumps(described))
    with pytest.raises(InputDataError, match=r"is not the file that x\.json describes"):
        interop.read(path)
    # Named without its suffix, or by its description.
    for name in ("x", "x.json"):
        with pytest.raises(InputDataError, match=r"give the file beside it: .*x\.safetensors"):
            protlm.load(tmp_path / name)


def split(folder: Path) -> Path:
    """Divides the weights into two parts; returns the index that lists them."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {}
    for number, names in enumerate((sorted(tensors)[:9], sorted(tensors)[9:]), start=1):
        part = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / part)
        parts |= dict.fromkeys(names, part)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": parts}))
    return index


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
ADAPTER = {
    "adapter_config.json": '{"base_model_name_or_path": "esm2"}',
    "adapter_model.safetensors": POINTER,
}
MERGE = r"adapter of PEFT to 'esm2', .*merge_and_unload"
SHORTER = "without its end"
LARGE = json.dumps({**ESM.settings, "x": "y" * (1 << 20)})
# A model, what its files become, None if they are removed, what is loaded, and the message.
DAMAGED: list[tuple[str, dict[str, str | None], str, str]] = [
    ("esm2", {"config.json": "{}{"}, "", r"config\.json is not JSON: Extra data: line"),
    ("esm2", {"config.json": LARGE}, "", r"config\.json is not JSON"),
    ("esm2", {"model.safetensors": SHORTER}, "", r"model.safetensors is not a file of safetens"),
    ("esm2", {"model.safetensors": None}, "", r"has no weights: neither model\.safetensors nor"),
    ("esm2", {"model.safetensors": POINTER}, "", r"is a pointer of Git LFS, .*: git lfs pull"),
    ("fair_esm2", {"model.pt": POINTER}, "model.pt", r"is a pointer of Git LFS, .*: git lfs pull"),
    ("esm2", ADAPTER, "", MERGE),
    ("esm2", ADAPTER, "adapter_model.safetensors", MERGE),
    ("esm2", {**ADAPTER, "config.json": None}, "", "adapter of PEFT"),
    ("ablang", {"amodel.pt": None}, "", r"amodel.pt: no such file; .* weights of AbLang"),
    ("roberta", {"model.json": None}, "model.safetensors", r"has no model\.json beside it"),
]


@pytest.mark.parametrize("name, files, given, message", DAMAGED)
def test_what_is_damaged_or_missing_is_named(name, files, given, message, tmp_path):
    FAMILIES[name].save(tmp_path / name)
    for file, text in files.items():
        path = tmp_path / name / file
        if text is None:
            path.unlink()
        elif text == SHORTER:
            path.write_bytes(path.read_bytes()[:-10])
        else:
            path.write_text(text)
    with pytest.raises(InputDataError, match=message):
        protlm.load(tmp_path / name / given)


def test_parts_are_read_together(write_esm):
    whole, parts = write_esm("whole"), write_esm("parts")
    split(parts)
    expected = interop.read(whole).weights
    assert weights_hash(interop.read(parts).weights) == weights_hash(expected)
    first = parts / "model-00001-of-00002.safetensors"
    shutil.copy(whole / "model.safetensors", first)
    with pytest.raises(InputDataError, match=r"00002-of-00002.safetensors repeats 'esm\.encoder"):
        interop.read(parts)
    first.unlink()
    with pytest.raises(InputDataError, match=r"00001-of-00002.safetensors: no such file"):
        interop.read(parts)


def test_only_the_named_weights_are_read(write_esm):
    """A backup beside them has another name; a pickle is read where there is nothing else."""
    folder = write_esm()
    expected = weights_hash(interop.read(folder).weights)
    other = {name: torch.zeros_like(value) for name, value in ESM.tensors().items()}
    save_file(other, folder / "model_old.safetensors")
    torch.save(other, folder / "pytorch_model.bin")
    assert weights_hash(interop.read(folder).weights) == expected
    (folder / "model.safetensors").rename(folder / "model_new.safetensors")
    assert weights_hash(interop.read(folder).weights) != expected
    torch.save(ESM.tensors(), folder / "pytorch_model.bin")
    assert weights_hash(interop.read(folder).weights) == expected


@pytest.mark.parametrize("part", ["../x.safetensors", "/etc/x", "a/b", "..", "", 3, "a\\b"])
def test_an_index_lists_files_of_its_folder_only(part, write_esm):
    index = split(write_esm())
    index.write_text(json.dumps({"weight_map": {"esm.x": part}}))
    with pytest.raises(InputDataError, match=r"index\.json lists .* not a file in its folder"):
        interop.read(index.parent)
    index.write_text(json.dumps({"weight_map": [part]}))
    with pytest.raises(InputDataError, match=r"index\.json lists no files"):
        interop.read(index.parent)
