"""ESM-2 and ESM C: what the other families do not have."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

import protlm
from protlm import interop
from protlm.analysis.contact_regression import ContactRegression, head_features
from protlm.checkpoints.description import ModelDescription
from protlm.data.vocabulary import VOCABULARY
from protlm.interop import esmc
from protlm.interop.layout import used_once
from protlm.system.errors import InputDataError
from protlm.system.paths import sha256_of
from tests.interop.families import ESM, ESMC_LIBRARY, FAIR_ESM, FAIR_ESM_1B, FAMILIES
from tests.interop.test_families import ROWS, assert_same, batch
from tests.rounding import error_bound

Write = Callable[..., Path]


@pytest.mark.peers
def test_what_transformers_saves_is_read(write_esm, tmp_path):
    """It renames norms, and has one tensor of frequencies."""
    from transformers import EsmForMaskedLM

    folder = write_esm()
    EsmForMaskedLM.from_pretrained(folder, dtype=torch.float64).save_pretrained(tmp_path / "saved")
    found, expected = interop.read(tmp_path / "saved"), interop.read(folder)
    assert found.description.model == expected.description.model
    assert_same(found.weights, expected.weights)


@pytest.mark.peers
def test_contacts_are_those_of_hugging_face(write_esm, in_double):
    from transformers import EsmForMaskedLM

    folder, sequence = write_esm(), ROWS[0]
    peer = EsmForMaskedLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    model = protlm.load(folder)
    model.network = in_double(folder)
    tokens_BL, mask_BL = batch([sequence])
    with torch.no_grad():
        expected_LL = peer.predict_contacts(tokens_BL, mask_BL.long())[0].numpy()
    head = interop.read(folder).contacts
    assert head is not None
    regression = ContactRegression.from_dict({"seed": 0, **asdict(head)})
    features_HLL = head_features(model, sequence)
    maps = model.attention_maps(model.tokenize([sequence]))
    maps_HLL = torch.cat([maps[n][0, :, 1:-1, 1:-1] for n in sorted(maps)]).numpy()
    # Maps and features are rounded to float32: s - r c / t changes by 4 (s + |f|) roundings at
    # most, and a probability by a quarter of its logit.
    sizes_HLL = maps_HLL + maps_HLL.swapaxes(1, 2) + np.abs(features_HLL)
    condition = float(np.tensordot(np.abs(head.weights), sizes_HLL, axes=1).max())
    bound = error_bound(torch.float32, condition, 1)
    np.testing.assert_allclose(regression.predict(features_HLL), expected_LL, rtol=0, atol=bound)


@pytest.mark.parametrize("value", [torch.ones(2), [], argparse.Namespace()], ids=type)
def test_settings_that_json_could_not_contain_are_ignored(value, tmp_path):
    with pytest.raises(InputDataError, match="layers=None"):
        interop.read(FAIR_ESM_1B.save(tmp_path / "esm1b", layers=value))


def test_the_contact_head_of_fair_esm_is_in_a_file_beside(write_esm, tmp_path):
    tensors = FAIR_ESM.tensors()
    trunk = {name: value for name, value in tensors.items() if "contact_head" not in name}
    path = FAIR_ESM.save(tmp_path / "fair", trunk)
    assert interop.read(path).contacts is None
    head = {n.removeprefix("encoder.sentence_encoder."): v for n, v in tensors.items()}
    head = {n: v for n, v in head.items() if n.startswith("contact_head.")}
    beside = path.with_name("model-contact-regression.pt")
    torch.save({"model": head}, beside)
    found, same = interop.read(path), write_esm(tensors=ESM.tensors(FAIR_ESM.weights()))
    assert found.contacts == interop.read(same).contacts
    source = {"family": "esm", "sha256": sha256_of(path), "contacts_sha256": sha256_of(beside)}
    assert found.description.source == source
    assert ModelDescription.parse(path, found.description.to_plain()) == found.description
    other = {"contact_head.regression.weight": torch.zeros(1, 8)}
    for wrong, message in (
        (
            head | {"layers.0.fc1.bias": torch.zeros(3)},
            r"'layers\.0\.fc1\.bias', which is not",
        ),
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


def test_no_frequencies_are_those_of_the_formula(write_esm):
    tensors = {n: v for n, v in ESM.tensors().items() if not n.endswith("inv_freq")}
    # Transformers 4 saved a table of positions that is not used.
    tensors["esm.embeddings.position_embeddings.weight"] = torch.zeros(2, 2)
    found = interop.read(write_esm(tensors=tensors))
    assert not found.description.model.stored_frequencies
    assert not {"rotary.frequency", "positions.table"} & found.weights.keys()


def test_usual_settings_that_are_written_out_are_read(write_esm):
    rope = {"rope_type": "default", "rope_theta": 10_000}
    changes = {"cls_token_id": 0, "eos_token_id": 2, "rope_scaling": None, "rope_parameters": rope}
    changes |= {"is_folding_model": False, "esmfold_config": None, "vocab_list": None}
    found = interop.read(write_esm("written", tie_word_embeddings=False, **changes))
    assert found.description.model == interop.read(write_esm("usual")).description.model


@pytest.mark.parametrize("name", ["esm2", "bert"])
def test_an_output_layer_that_is_missing_is_refused(name, tmp_path):
    example = FAMILIES[name]
    tensors = {n: v for n, v in example.tensors().items() if not n.endswith("decoder.weight")}
    interop.read(example.save(tmp_path / "tied", tensors, tie_word_embeddings=True))
    with pytest.raises(InputDataError, match="tie_word_embeddings=False is not supported"):
        interop.read(example.save(tmp_path / "untied", tensors, tie_word_embeddings=False))


def test_the_alphabet_must_be_that_of_esm_2(write_esm):
    folder = write_esm()
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
            interop.read(folder)
    with pytest.raises(InputDataError, match=r"tokenizer\.json does not have the 33 tokens"):
        interop.read(folder)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("", "module.", "as DataParallel or .* save the model in it, model.module, and"),
        ("", "_orig_mod.", "as torch.compile saves them; save .* model._orig_mod, and"),
        ("", "model.", "such as one of Lightning,"),
        ("esm.", "", r"has no output layer \(lm_head.*EsmForMaskedLM.*: give the EsmFor"),
        ("lm_head.", "classifier.", "or has the head of another task"),
    ],
)
def test_what_another_program_saved_is_said(old, new, message, write_esm):
    tensors = {n.replace(old, new, 1): v for n, v in ESM.tensors().items()}
    if not new:
        tensors = {n: v for n, v in tensors.items() if "lm_head" not in n}
    with pytest.raises(InputDataError, match=message):
        interop.read(write_esm(tensors=tensors))


def test_many_names_are_counted(tmp_path):
    with pytest.raises(InputDataError, match=r"lacks 6 tensors \('0', '1', '2', '3' and 2 more\)"):
        used_once(tmp_path, {}, {f"our{n}": str(n) for n in range(6)})


def test_a_license_that_restricts_users_is_printed(tmp_path, monkeypatch, capsys):
    model = ESMC_LIBRARY.save(tmp_path / "esmc")
    interop.read(model)
    assert capsys.readouterr().err == ""
    monkeypatch.setitem(esmc._LICENSES, ESMC_LIBRARY.width, esmc._LICENSES[1152])
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
    stored["source"] = {"license": "MIT", "converted_from": "softmax", "converted_hash": "0"}
    with pytest.raises(InputDataError, match=r"source=.* must have family, sha256"):
        ModelDescription.parse(model, stored)
