"""Files of foreign models: which are recognized and which refused, and what only ESM has."""

import argparse
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import protlm
from protlm import interop
from protlm.checkpoints.description import ModelDescription
from protlm.checkpoints.format import weights_hash
from protlm.data.vocabulary import VOCABULARY
from protlm.interop.esmc import Esmc
from protlm.interop.layout import used_once
from protlm.system.errors import InputDataError
from protlm.system.paths import sha256_of
from tests.faults.test_damaged_checkpoints import Malicious
from tests.interop.families import ESM, ESMC_LIBRARY, FAIR_ESM, FAIR_ESM_1B, FAMILIES


def test_protlm_s_own_models_are_not_foreign(tiny_run, tmp_path):
    assert not interop.is_foreign(tiny_run)
    assert not interop.is_foreign(tmp_path / "missing")
    assert not interop.is_foreign(tmp_path / "step-00000001.ckpt")


@pytest.mark.parametrize("form", ["esm2.pt", "folder"])
def test_code_in_a_pickle_does_not_run(form, tmp_path):
    canary, bad = tmp_path / "canary", Malicious(tmp_path / "canary")
    for contents in (bad, {"model": bad}, {"cfg": {"model": bad}, "model": {}}):
        path = tmp_path / "esm2.pt"
        target = path
        if form == "folder":
            path = ESM.save(tmp_path / f"esm{len(list(tmp_path.iterdir()))}")
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
MERGE = r"adapter of PEFT to 'esm2', .*; give its base: protlm checkpoint import .*, with the base"
SHORTER = "without its end"
# A model, what its files become, None if they are removed, what is loaded, and the message.
DAMAGED: list[tuple[str, dict[str, str | None], str, str]] = [
    ("esm2", {"config.json": "{}{"}, "", r"config\.json is not JSON: Extra data: line"),
    ("esm2", {"model.safetensors": SHORTER}, "", r"model.safetensors is not a file of safetens"),
    ("esm2", {"model.safetensors": None}, "", r"has no weights: neither model\.safetensors nor"),
    ("esm2", {"model.safetensors": POINTER}, "", r"is a pointer of Git LFS, .*: git lfs pull"),
    ("fair_esm2", {"model.pt": None}, "model.pt", r"model\.pt: no such file"),
    ("fair_esm2", {"model.pt": SHORTER}, "model.pt", r"model\.pt is not a file of"),
    ("roberta", {"model.safetensors": None}, "model.safetensors", r"safetensors: no such file"),
    ("roberta", {"model.safetensors": SHORTER}, "model.safetensors", r"is not a file of"),
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


def test_parts_are_read_together(tmp_path):
    whole, parts = ESM.save(tmp_path / "whole"), ESM.save(tmp_path / "parts")
    split(parts)
    assert weights_hash(interop.read(parts).weights) == weights_hash(interop.read(whole).weights)
    first = parts / "model-00001-of-00002.safetensors"
    shutil.copy(whole / "model.safetensors", first)
    with pytest.raises(InputDataError, match=r"00002-of-00002.safetensors repeats 'esm\.encoder"):
        interop.read(parts)
    first.unlink()
    with pytest.raises(InputDataError, match=r"00001-of-00002.safetensors: no such file"):
        interop.read(parts)


def test_only_the_named_weights_are_read(tmp_path):
    """A backup beside them has another name; a pickle is read where there is nothing else."""
    folder = ESM.save(tmp_path / "esm")
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
def test_an_index_lists_files_of_its_folder_only(part, tmp_path):
    index = split(ESM.save(tmp_path / "esm"))
    index.write_text(json.dumps({"weight_map": {"esm.x": part}}))
    with pytest.raises(InputDataError, match=r"index\.json lists .* not a file in its folder"):
        interop.read(index.parent)
    index.write_text(json.dumps({"weight_map": [part]}))
    with pytest.raises(InputDataError, match=r"index\.json lists no files"):
        interop.read(index.parent)


@pytest.mark.parametrize("value", [torch.ones(2), [], argparse.Namespace()], ids=type)
def test_settings_that_json_could_not_contain_are_ignored(value, tmp_path):
    with pytest.raises(InputDataError, match="layers=None"):
        interop.read(FAIR_ESM_1B.save(tmp_path / "esm1b", layers=value))


def test_the_contact_head_of_fair_esm_is_in_a_file_beside(tmp_path):
    tensors = FAIR_ESM.tensors()
    trunk = {name: value for name, value in tensors.items() if "contact_head" not in name}
    path = FAIR_ESM.save(tmp_path / "fair", trunk)
    assert interop.read(path).contacts is None
    head = {n.removeprefix("encoder.sentence_encoder."): v for n, v in tensors.items()}
    head = {n: v for n, v in head.items() if n.startswith("contact_head.")}
    beside = path.with_name("model-contact-regression.pt")
    torch.save({"model": head}, beside)
    found, same = interop.read(path), ESM.save(tmp_path / "esm", ESM.tensors(FAIR_ESM.weights()))
    assert found.contacts == interop.read(same).contacts
    source = {"family": "esm", "sha256": sha256_of(path), "contacts_sha256": sha256_of(beside)}
    assert found.description.source == source
    assert ModelDescription.parse(path, found.description.to_plain()) == found.description
    other = {"contact_head.regression.weight": torch.zeros(1, 8)}
    for wrong, message in (
        (head | {"layers.0.fc1.bias": torch.zeros(3)}, r"'layers\.0\.fc1\.bias', which is not"),
        (other, "has a contact head for other than the 8 heads"),
    ):
        torch.save({"model": wrong}, beside)
        with pytest.raises(InputDataError, match=message):
            interop.read(path)


def test_fair_esm_files_need_positions_of_one_kind(tmp_path):
    tensors, learned = FAIR_ESM.tensors(), FAMILIES["fair_esm1v"].tensors()
    without = {name: value for name, value in tensors.items() if not name.endswith("inv_freq")}
    for number, changed in enumerate((without, learned | tensors)):
        with pytest.raises(InputDataError, match=r"must have either the frequencies .* ESM-1b"):
            interop.read(FAIR_ESM.save(tmp_path / str(number), changed))


def test_no_frequencies_are_those_of_the_formula(tmp_path):
    tensors = {n: v for n, v in ESM.tensors().items() if not n.endswith("inv_freq")}
    # Transformers 4 saved a table of positions that is not used.
    tensors["esm.embeddings.position_embeddings.weight"] = torch.zeros(2, 2)
    found = interop.read(ESM.save(tmp_path / "esm", tensors=tensors))
    assert not found.description.model.stored_frequencies
    assert not {"rotary.frequency", "positions.table"} & found.weights.keys()


def test_usual_settings_that_are_written_out_are_read(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 10_000}
    changes = {"cls_token_id": 0, "eos_token_id": 2, "rope_scaling": None, "rope_parameters": rope}
    changes |= {"is_folding_model": False, "esmfold_config": None, "vocab_list": None}
    found = interop.read(ESM.save(tmp_path / "written", tie_word_embeddings=False, **changes))
    assert found.description.model == interop.read(ESM.save(tmp_path / "usual")).description.model


@pytest.mark.parametrize("name", ["esm2", "bert"])
def test_an_output_layer_that_is_missing_is_refused(name, tmp_path):
    example = FAMILIES[name]
    tensors = {n: v for n, v in example.tensors().items() if not n.endswith("decoder.weight")}
    interop.read(example.save(tmp_path / "tied", tensors, tie_word_embeddings=True))
    with pytest.raises(InputDataError, match="tie_word_embeddings=False is not supported"):
        interop.read(example.save(tmp_path / "untied", tensors, tie_word_embeddings=False))


def test_the_alphabet_must_be_that_of_esm_2(tmp_path):
    folder = ESM.save(tmp_path / "esm")
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY.tokens))
    interop.read(folder)
    (folder / "vocab.txt").write_text("\n".join(sorted(VOCABULARY.tokens)))
    with pytest.raises(InputDataError, match=r"vocab\.txt does not have the 33 tokens of ESM-2 in"):
        interop.read(folder)
    for tokens in (VOCABULARY.tokens, sorted(VOCABULARY.tokens)):
        numbers = {token: number for number, token in enumerate(tokens)}
        added = [{"content": t, "id": numbers.pop(t)} for t in VOCABULARY.tokens if "<" in t]
        contents = {"model": {"vocab": numbers}, "added_tokens": added}
        (folder / "tokenizer.json").write_text(json.dumps(contents))
        if tokens == VOCABULARY.tokens:
            with pytest.raises(InputDataError, match=r"tokenizer\.json and .*vocab.*'-' different"):
                interop.read(folder)
            (folder / "vocab.txt").unlink()
            interop.read(folder)
    with pytest.raises(InputDataError, match=r"tokenizer\.json does not have the 33 tokens"):
        interop.read(folder)
    unigram = {"model": {"vocab": [[token, -1.0] for token in VOCABULARY.tokens]}}
    (folder / "tokenizer.json").write_text(json.dumps(unigram))
    interop.read(folder)


def test_many_names_are_counted(tmp_path):
    with pytest.raises(InputDataError, match=r"lacks 6 tensors \('0', '1', '2', '3' and 2 more\)"):
        used_once(tmp_path, {}, {f"our{n}": str(n) for n in range(6)})


def test_a_license_that_restricts_users_is_printed(tmp_path, monkeypatch, capsys):
    model = ESMC_LIBRARY.save(tmp_path / "esmc")
    interop.read(model)
    assert capsys.readouterr().err == ""
    monkeypatch.setitem(Esmc.licenses, ESMC_LIBRARY.width, Esmc.licenses[1152])
    interop.read(model)
    told = capsys.readouterr().err
    assert told.startswith("license: ESM C 600M was published by EvolutionaryScale under the")
    assert "Cambrian Non-Commercial License" in told
    assert len(told.splitlines()) == 1
    # It is kept with the model, and printed by protlm checkpoint info.
    read_again = interop.read(model).description
    stored = read_again.to_plain()
    assert stored["source"]["license"] == told.removeprefix("license: ").strip()
    assert ModelDescription.parse(model, stored) == read_again
