"""ESM-2, ESM-1b, ESM-1v: layouts are read alike, outputs are those of transformers."""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import protlm
from protlm import interop
from protlm.analysis.contact_regression import ContactRegression, head_features
from protlm.checkpoints.description import ModelDescription
from protlm.data.vocabulary import VOCABULARY
from protlm.interop.base import renamed
from protlm.model.transformer import ProteinLM
from protlm.system.errors import InputDataError
from protlm.system.paths import sha256_of
from tests.interop.conftest import LAYERS, WIDTH, esm_tensors
from tests.rounding import error_bound

Write = Callable[..., Path]
ROWS = ["MKTVRQERLKSIVRILERSKEPVS", "MK", "M<mask>TVRQERL", "MK<mask>VR<mask><mask>RLKSIVXBUZO"]
# Hugging Face's names in fairseq's.
FAIRSEQ = [
    (r"esm\.embeddings\.word_embeddings", "encoder.sentence_encoder.embed_tokens"),
    (r"esm\.embeddings\.position_embeddings", "encoder.sentence_encoder.embed_positions"),
    (r"esm\.embeddings\.layer_norm", "encoder.sentence_encoder.emb_layer_norm_before"),
    (r"esm\.encoder\.layer\.", "encoder.sentence_encoder.layers."),
    (r"esm\.encoder\.", "encoder.sentence_encoder."),
    (r"esm\.contact_head", "encoder.sentence_encoder.contact_head"),
    (r"lm_head\.decoder\.weight", "lm_head.weight"),
    (r"^lm_head", "encoder.lm_head"),
    (r"attention\.LayerNorm", "self_attn_layer_norm"),
    (r"(\d)\.LayerNorm", r"\1.final_layer_norm"),
    (r"attention\.self\.(query|key|value)", lambda found: f"self_attn.{found[1][0]}_proj"),
    (r"attention\.self\.rotary_embeddings", "self_attn.rot_emb"),
    (r"attention\.output\.dense", "self_attn.out_proj"),
    (r"intermediate\.dense", "fc1"),
    (r"output\.dense", "fc2"),
]


def fairseq_name(name: str) -> str:
    for pattern, replacement in FAIRSEQ:
        name = re.sub(pattern, replacement, name)
    return name


def batch(rows: list[str]) -> tuple[Tensor, Tensor]:
    """Tokens and mask of sequences with `<mask>`, padded to the longest."""
    split = [re.findall(r"<mask>|[A-Z]", row) for row in rows]
    tokens_BL = torch.full((len(rows), max(map(len, split)) + 2), VOCABULARY.pad)
    for number, residues in enumerate(split):
        tokens = [VOCABULARY.cls, *(VOCABULARY[r] for r in residues), VOCABULARY.eos]
        tokens_BL[number, : len(tokens)] = torch.tensor(tokens)
    return tokens_BL, tokens_BL != VOCABULARY.pad


def outputs(network: ProteinLM, tokens_BL: Tensor, mask_BL: Tensor) -> dict[str, list[Tensor]]:
    """Logits, hidden states and maps, at tokens only."""
    with torch.no_grad():
        out = network(tokens_BL, mask_BL, causal=False, layers=range(LAYERS + 1))
        maps = []
        for number, x in network.attention_inputs(tokens_BL, mask_BL, causal=False):
            maps.append(
                network.mechanism(number).attention_map(
                    x.q_BHLK, x.k_BHLK, hidden_BLD=x.hidden_BLD, mask_BL=mask_BL, causal=False
                )
            )
    return at_tokens([out.logits_BLV], [out.hidden[n] for n in sorted(out.hidden)], maps, mask_BL)


def at_tokens(
    logits: list[Tensor], hidden: list[Tensor], maps: list[Tensor], mask_BL: Tensor
) -> dict[str, list[Tensor]]:
    rows = mask_BL[:, None, :, None].expand_as(maps[0])
    return {
        "logits": [x[mask_BL] for x in logits],
        "hidden": [x[mask_BL] for x in hidden],
        "maps": [x[rows] for x in maps],
    }


def peer_outputs(peer: Any, tokens_BL: Tensor, mask_BL: Tensor) -> dict[str, list[Tensor]]:
    with torch.no_grad():
        out = peer(
            input_ids=tokens_BL,
            attention_mask=mask_BL.long(),
            output_hidden_states=True,
            output_attentions=True,
        )
    return at_tokens([out.logits], list(out.hidden_states), list(out.attentions), mask_BL)


def assert_equal(found: dict[str, list[Tensor]], expected: dict[str, list[Tensor]]) -> None:
    for kind, values in expected.items():
        for one, other in zip(found[kind], values, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.peers
@pytest.mark.parametrize("perturbed", [False, True])
@pytest.mark.parametrize("rows", [ROWS[:1], ROWS[3:], ROWS], ids=["plain", "masked", "padded"])
def test_outputs_are_those_of_hugging_face(
    rows: list[str], perturbed: bool, write_esm: Write, in_double: Callable[[Path], ProteinLM]
) -> None:
    from transformers import EsmForMaskedLM

    tensors = esm_tensors()
    for name in tensors:
        if perturbed and name.endswith("inv_freq"):
            tensors[name] *= torch.tensor([1.0, 1.1, 0.9, 1.2])
    folder = write_esm(tensors=tensors)
    peer = EsmForMaskedLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    network = in_double(folder)
    inputs = batch(rows)
    assert_equal(outputs(network, *inputs), peer_outputs(peer, *inputs))


@pytest.mark.peers
def test_single_precision_is_that_of_hugging_face(esm2_8m: Path) -> None:
    from transformers import EsmForMaskedLM

    peer = EsmForMaskedLM.from_pretrained(esm2_8m, attn_implementation="eager").eval()
    inputs = batch(ROWS)
    network = protlm.load(esm2_8m).network
    with torch.no_grad():
        found = network(*inputs, causal=False).logits_BLV
        expected = peer(input_ids=inputs[0], attention_mask=inputs[1].long()).logits
    at = inputs[1]
    torch.testing.assert_close(found[at], expected[at], rtol=0, atol=1e-5)


@pytest.mark.peers
def test_what_transformers_saves_is_read(write_esm: Write, tmp_path: Path) -> None:
    """It renames norms, and has one tensor of frequencies."""
    from transformers import EsmForMaskedLM

    folder = write_esm()
    EsmForMaskedLM.from_pretrained(folder, dtype=torch.float64).save_pretrained(tmp_path / "saved")
    found, expected = interop.read(tmp_path / "saved"), interop.read(folder)
    assert found.description.model == expected.description.model
    assert_same(found.weights, expected.weights)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def esm_1_tensors(*, norm: bool) -> dict[str, Tensor]:
    """ESM-1b with a norm of the embedding, or ESM-1v without; a table of 64 positions."""
    tensors = {n: v for n, v in esm_tensors().items() if not n.endswith("inv_freq")}
    generator = torch.Generator().manual_seed(1)
    shapes = {"position_embeddings.weight": (66, WIDTH)}
    shapes |= {"layer_norm.weight": (WIDTH,), "layer_norm.bias": (WIDTH,)} if norm else {}
    for name, shape in shapes.items():
        tensors[f"esm.embeddings.{name}"] = torch.randn(
            shape, generator=generator, dtype=torch.float64
        )
    return tensors


def write_esm_1(write_esm: Write, name: str, *, norm: bool) -> Path:
    """Writes the folder of Hugging Face, in which the embedding of `<mask>` is zero."""
    tensors = esm_1_tensors(norm=norm)
    for matrix in ("esm.embeddings.word_embeddings.weight", "lm_head.decoder.weight"):
        tensors[matrix][VOCABULARY.mask] = 0
    changes = {"position_embedding_type": "absolute", "emb_layer_norm_before": norm}
    return write_esm(name, tensors=tensors, max_position_embeddings=66, **changes)


@pytest.mark.peers
@pytest.mark.parametrize("norm", [True, False], ids=["ESM-1b", "ESM-1v"])
def test_learned_positions_are_those_of_hugging_face(
    norm: bool, write_esm: Write, in_double: Callable[[Path], ProteinLM]
) -> None:
    from transformers import EsmForMaskedLM

    folder = write_esm_1(write_esm, "esm1", norm=norm)
    peer = EsmForMaskedLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    assert protlm.load(folder).max_length == 64
    inputs = batch(ROWS)
    assert_equal(outputs(in_double(folder), *inputs), peer_outputs(peer, *inputs))


@pytest.mark.peers
def test_contacts_are_those_of_hugging_face(
    write_esm: Write, in_double: Callable[[Path], ProteinLM]
) -> None:
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


def fair_esm(path: Path, tensors: dict[str, Tensor]) -> Path:
    """Writes an ESM-2 as fair-esm does."""
    settings = argparse.Namespace(
        encoder_layers=LAYERS,
        encoder_embed_dim=WIDTH,
        encoder_attention_heads=4,
        token_dropout=True,
        other=argparse.Namespace(arch="x"),
    )
    torch.save({"cfg": {"model": settings}, "model": in_fairseq(tensors)}, path)
    return path


def fair_esm_1(path: Path, *, norm: bool, **settings: Any) -> Path:
    """Writes an ESM-1b or ESM-1v as fair-esm does."""
    # Names of all settings are with the prefix, or none.
    prefix = "encoder_" if "encoder_layers" in settings else ""
    settings[f"{prefix}token_dropout"] = True
    args = argparse.Namespace(arch="roberta_large", **settings)
    torch.save({"args": args, "model": in_fairseq(esm_1_tensors(norm=norm))}, path)
    return path


def in_fairseq(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {fairseq_name(name): value for name, value in tensors.items()}


def test_fair_esm_files_have_the_same_model(write_esm: Write, tmp_path: Path) -> None:
    found = interop.read(fair_esm(tmp_path / "esm2.pt", esm_tensors()))
    expected = interop.read(write_esm())
    assert found.description.model == expected.description.model
    assert found.contacts == expected.contacts
    assert_same(found.weights, expected.weights)


@pytest.mark.parametrize("prefix", ["", "encoder_"])
@pytest.mark.parametrize("norm", [True, False], ids=["ESM-1b", "ESM-1v"])
def test_fair_esm_files_with_learned_positions_have_the_same_model(
    norm: bool, prefix: str, write_esm: Write, tmp_path: Path
) -> None:
    sizes = {"layers": LAYERS, "embed_dim": WIDTH, "attention_heads": 4, "max_positions": 64}
    settings = {f"{prefix}{key}": value for key, value in sizes.items()}
    found = interop.read(fair_esm_1(tmp_path / "esm1.pt", norm=norm, **settings))
    expected = interop.read(write_esm_1(write_esm, "esm1", norm=norm))
    assert found.description.model == expected.description.model
    assert found.description.model.embedding_norm is norm
    assert found.description.model.token_dropout
    assert_same(found.weights, expected.weights)


def test_a_contact_head_of_nan_is_refused(write_esm: Write) -> None:
    head = {n: torch.full_like(v, torch.nan) for n, v in esm_tensors().items() if "contact" in n}
    with pytest.raises(InputDataError, match=r"NaN or infinite numbers in .contact_head"):
        interop.read(write_esm(tensors=esm_tensors() | head))


@pytest.mark.parametrize("value", [torch.ones(2), [], argparse.Namespace()], ids=type)
def test_settings_that_json_could_not_contain_are_ignored(value: Any, tmp_path: Path) -> None:
    sizes = {"embed_dim": WIDTH, "attention_heads": 4, "max_positions": 64}
    with pytest.raises(InputDataError, match="layers"):
        interop.read(fair_esm_1(tmp_path / "esm1.pt", norm=True, layers=value, **sizes))


def test_the_contact_head_of_fair_esm_is_in_a_file_beside(write_esm: Write, tmp_path: Path) -> None:
    tensors, path = in_fairseq(esm_tensors()), tmp_path / "esm2.pt"
    trunk = {n: v for n, v in esm_tensors().items() if "contact_head" not in n}
    assert interop.read(fair_esm(path, trunk)).contacts is None
    head = {n.removeprefix("encoder.sentence_encoder."): v for n, v in tensors.items()}
    head = {n: v for n, v in head.items() if n.startswith("contact_head.")}
    beside = tmp_path / "esm2-contact-regression.pt"
    torch.save({"model": head}, beside)
    found = interop.read(path)
    assert found.contacts == interop.read(write_esm()).contacts
    source = {"family": "esm", "sha256": sha256_of(path), "contacts_sha256": sha256_of(beside)}
    assert found.description.source == source
    assert ModelDescription.parse(path, found.description.to_plain()) == found.description
    torch.save({"model": head | {"layers.0.fc1.bias": torch.zeros(3)}}, beside)
    with pytest.raises(InputDataError, match=r"'layers\.0\.fc1\.bias', which is not part of"):
        interop.read(path)
    torch.save({"model": {"contact_head.regression.weight": torch.zeros(1, 8)}}, beside)
    with pytest.raises(InputDataError, match="has a contact head for other than the 8 heads"):
        interop.read(path)


def test_fair_esm_files_need_positions_of_one_kind(tmp_path: Path) -> None:
    without = {n: v for n, v in esm_tensors().items() if not n.endswith("inv_freq")}
    both = esm_tensors() | esm_1_tensors(norm=False)
    for tensors in (without, both):
        with pytest.raises(InputDataError, match=r"must have either the frequencies .* ESM-1b"):
            interop.read(fair_esm(tmp_path / "esm2.pt", tensors))


def test_no_frequencies_are_those_of_the_formula(write_esm: Write) -> None:
    tensors = {n: v for n, v in esm_tensors().items() if not n.endswith("inv_freq")}
    found = interop.read(write_esm(tensors=tensors))
    assert not found.description.model.stored_frequencies
    assert "rotary.frequency" not in found.weights


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "esm3"}, r"type 'esm3'; protlm reads: ablang, amplify, bert, esm, esmc"),
        ({"model_type": "base"}, r"type 'base'; protlm reads: ablang, amplify, bert, esm, esmc"),
        ({"is_folding_model": True}, "is_folding_model=True is not supported"),
        ({"vocab_size": 34}, "vocab_size=34 is not supported"),
        ({"vocab_size": 446}, "is a SaProt: its 446 tokens .* not support; give an ESM-2 model"),
        ({"hidden_size": "32"}, "hidden_size='32' must be a whole number above 0"),
        ({"layer_norm_eps": 0}, "layer_norm_eps=0 must be between 0 and 1"),
        ({"cls_token_id": 5}, r"cls_token_id=5 is not supported; .*cls_token_id=0 or None"),
        ({"eos_token_id": 3}, r"eos_token_id=3 is not supported; .*eos_token_id=2 or None"),
        ({"rope_theta": 500_000}, "rope_theta=500000 is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling=.* is not supported"),
        ({"rope_parameters": {"rope_theta": 5e5}}, "rope_parameters=.* is not supported"),
        ({"position_embedding_type": "relative"}, "reads models with .*'rotary' or 'absolute'"),
        ({"position_embedding_type": "absolute"}, "lacks 1 tensor .*position_embeddings.weight"),
        ({"num_hidden_layers": 3}, "the weights of 2 layers, and its settings say 3"),
        ({"num_attention_heads": 5}, "settings of 5 heads, which do not divide its width, 32"),
        ({"intermediate_size": 10**9}, "far larger than the weights"),
    ],
)
def test_other_settings_are_refused(
    changes: dict[str, Any], message: str, write_esm: Write
) -> None:
    with pytest.raises(InputDataError, match=message):
        tensors = {n: v for n, v in esm_tensors().items() if "contact_head" not in n}
        protlm.load(write_esm(tensors=tensors, **changes))


def test_usual_settings_that_are_written_out_are_read(write_esm: Write) -> None:
    rope = {"rope_type": "default", "rope_theta": 10_000}
    changes = {"cls_token_id": 0, "eos_token_id": 2, "rope_scaling": None, "rope_parameters": rope}
    found = interop.read(write_esm("written", tie_word_embeddings=False, **changes))
    assert found.description.model == interop.read(write_esm("usual")).description.model


def test_an_output_layer_that_is_missing_is_refused(write_esm: Write) -> None:
    tensors = esm_tensors()
    del tensors["lm_head.decoder.weight"]
    interop.read(write_esm("tied", tensors=tensors, tie_word_embeddings=True))
    with pytest.raises(InputDataError, match="tie_word_embeddings=False is not supported"):
        interop.read(write_esm("untied", tensors=tensors, tie_word_embeddings=False))


def test_the_alphabet_must_be_that_of_esm_2(write_esm: Write) -> None:
    folder = write_esm()
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY.tokens))
    interop.read(folder)
    (folder / "vocab.txt").write_text("\n".join(sorted(VOCABULARY.tokens)))
    with pytest.raises(InputDataError, match="does not have the 33 tokens of ESM-2 in their order"):
        interop.read(folder)
    (folder / "vocab.txt").unlink()
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
def test_what_another_program_saved_is_said(
    old: str, new: str, message: str, write_esm: Write
) -> None:
    tensors = {n.replace(old, new, 1): v for n, v in esm_tensors().items()}
    if not new:
        tensors = {n: v for n, v in tensors.items() if "lm_head" not in n}
    with pytest.raises(InputDataError, match=message):
        interop.read(write_esm(tensors=tensors))


def test_a_contact_head_of_other_heads_is_refused(write_esm: Write) -> None:
    with pytest.raises(InputDataError, match="contact head for other than the 16 heads"):
        interop.read(write_esm(num_attention_heads=8))


def test_every_tensor_is_used_once(write_esm: Write) -> None:
    tensors = esm_tensors()
    name = "esm.encoder.layer.1.attention.self.key.bias"
    lacking = {key: value for key, value in tensors.items() if key != name}
    with pytest.raises(InputDataError, match=rf"lacks 1 tensor \('{re.escape(name)}'\)"):
        interop.read(write_esm("lacking", tensors=lacking))
    # The second is a layer that the model does not have.
    for extra in ("1.adapter.weight", "9.attention.self.key.weight"):
        more = tensors | {f"esm.encoder.layer.{extra}": torch.zeros(3, 3)}
        with pytest.raises(InputDataError, match=rf"has 1 tensor \('esm.*{extra}'\) that its"):
            interop.read(write_esm(extra, tensors=more))
    untied = tensors | {"lm_head.decoder.weight": torch.zeros(33, WIDTH)}
    with pytest.raises(InputDataError, match=r"lm_head\.decoder\.weight differs from esm"):
        interop.read(write_esm("untied", tensors=untied))
    different = dict(tensors)
    different["esm.encoder.layer.1.attention.self.rotary_embeddings.inv_freq"] = torch.ones(4)
    with pytest.raises(InputDataError, match="other rotary frequencies in each layer"):
        interop.read(write_esm("different", tensors=different))


@pytest.mark.parametrize(
    "name, shape",
    [
        ("esm.embeddings.word_embeddings.weight", ()),
        ("esm.embeddings.word_embeddings.weight", (32, WIDTH)),
        ("lm_head.bias", ()),
        ("esm.embeddings.position_embeddings.weight", ()),
    ],
)
def test_tensors_of_other_shapes_are_refused(
    name: str, shape: tuple[int, ...], write_esm: Write
) -> None:
    tensors = {n: v for n, v in esm_tensors().items() if not re.search(r"inv_freq|decoder", n)}
    changes = {"position_embedding_type": "absolute"} if "position" in name else {}
    folder = write_esm(tensors=tensors | {name: torch.zeros(shape)}, **changes)
    with pytest.raises(InputDataError, match=rf"has the shape \[{', '.join(map(str, shape))}\]"):
        interop.read(folder)


@pytest.mark.parametrize(
    "value, message",
    [
        (torch.ones(WIDTH, WIDTH, dtype=torch.int8), "as torch.int8: quantized models are not"),
        (torch.ones(WIDTH, WIDTH).to(torch.float8_e4m3fn), "as torch.float8_e4m3fn: quantized"),
        (torch.ones(WIDTH, WIDTH, dtype=torch.int64), "as torch.int64: quantized models are not"),
        (torch.full((WIDTH, WIDTH), torch.nan), "has NaN or infinite numbers in"),
        (torch.ones(WIDTH, WIDTH - 1), r"the tensor of blocks\.1\.attention\.key\.weight has the"),
    ],
)
def test_other_numbers_are_refused(value: Tensor, message: str, write_esm: Write) -> None:
    name = "esm.encoder.layer.1.attention.self.key.weight"
    folder = write_esm(tensors=esm_tensors() | {name: value})
    with pytest.raises(InputDataError, match=message):
        protlm.load(folder)


@pytest.mark.parametrize("end", ["layer.1.LayerNorm.bias", "inv_freq"])
def test_small_integers_are_refused_too(end: str, write_esm: Write) -> None:
    bad = {n: v.to(torch.int32) for n, v in esm_tensors().items() if n.endswith(end)}
    with pytest.raises(InputDataError, match=rf"{end}' as torch\.int32: quantized models are not"):
        interop.read(write_esm(tensors=esm_tensors() | bad))


def test_impossible_settings_name_the_file(write_esm: Write) -> None:
    folder = write_esm(max_position_embeddings=2)
    with pytest.raises(InputDataError, match=r"esm describes an impossible model: model\.max"):
        interop.read(folder)


def test_a_contact_head_is_compared_after_the_layers(write_esm: Write) -> None:
    with pytest.raises(InputDataError, match="the weights of 2 layers, and its settings say 3"):
        interop.read(write_esm(num_hidden_layers=3))


def test_many_names_are_counted(tmp_path: Path) -> None:
    with pytest.raises(InputDataError, match=r"lacks 6 tensors \('0', '1', '2', '3' and 2 more\)"):
        renamed(tmp_path, {}, {f"our{n}": str(n) for n in range(6)})
