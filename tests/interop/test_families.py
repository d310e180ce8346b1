"""What every family must pass: outputs are those of its paper, and of transformers if it has it.

Whatever else a file says or has, its tensors, settings and alphabet, is refused. Tokens of other
alphabets are read as protlm's, and probabilities keep their meaning.
"""

import itertools
import json
import os
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
from protlm.analysis.contact_regression import SavedFit, head_features
from protlm.bounds import Bounds
from protlm.config import Frame
from protlm.data.vocabulary import STANDARD, VOCABULARY, vocabulary_of
from protlm.model.contexts import NetworkInContext, Relative
from protlm.model.transformer import ProteinLM, build_network
from protlm.system.errors import InputDataError, UserError
from tests.interop.example import WIDTH, Example, published
from tests.interop.families import AMPLIFY, BERT, ESM, FAMILIES
from tests.marks import slow_but
from tests.rounding import error_bound

ROWS = ["MKTVRQERLKSIVRILERSKEPVS", "MK", "M<mask>TVRQERL", "MK<mask>VR<mask><mask>RLKSIVXBUZO"]
PEERS = {
    "esm2": "EsmForMaskedLM",
    "esm1v": "EsmForMaskedLM",
    "esm1b": "EsmForMaskedLM",
    "esmc": "EsmcForMaskedLM",
    "bert": "BertForMaskedLM",
    "dplm": "EsmForMaskedLM",
    "nv_esm": "EsmForMaskedLM",
    "nv_esmc": "EsmcForMaskedLM",
}
ALL = pytest.mark.parametrize("name", FAMILIES)


def batch(rows: list[str], frame: Frame | None = None) -> tuple[Tensor, Tensor]:
    """Tokens and mask of sequences with `<mask>`, padded to the longest."""
    words, split = vocabulary_of(frame), [re.findall(r"<mask>|[A-Z]", row) for row in rows]
    framed = [[*words.frame.prefix, *residues, *words.frame.suffix] for residues in split]
    tokens_BL = torch.full((len(rows), max(map(len, framed))), VOCABULARY.pad)
    for number, tokens in enumerate(framed):
        tokens_BL[number, : len(tokens)] = torch.tensor([words[token] for token in tokens])
    return tokens_BL, tokens_BL != VOCABULARY.pad


def outputs(
    network: ProteinLM, tokens_BL: Tensor, mask_BL: Tensor, *, causal: bool = False
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    with torch.no_grad():
        layers = range(network.num_layers + 1)
        out = network(tokens_BL, mask_BL, causal=causal, layers=layers)
        maps = [
            network.mechanism(number).attention_map(x.q_BHLK, x.k_BHLK, x.context)
            for number, x in network.attention_inputs(tokens_BL, mask_BL, causal=causal)
        ]
    return [out.hidden[number] for number in layers], maps, out.logits_BLV


@pytest.fixture
def in_double(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], ProteinLM]:
    """Builds the network of a foreign model in float64; `x.float()` is float64 from then on.

    Both programs round the angles of positions to float32.
    """

    def build(path: Path) -> ProteinLM:
        found = interop.read(path)
        described = found.description
        words, mechanism = vocabulary_of(described.frame), described.attention_config
        network = build_network(described.model, mechanism, seed=0, vocabulary=words).double()
        network.load_state_dict(found.weights)
        monkeypatch.setattr(Tensor, "float", Tensor.double)
        return network.eval()

    return build


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def assert_same_probabilities(example: Example, found_LV: Tensor, expected_LV: Tensor) -> None:
    """A token that several of ours are read as has the sum of their probabilities.

    The logits of the 20 residues are unchanged, and tokens that protlm lacks are left out.
    """
    numbers = torch.tensor(example.numbers())
    ours = [VOCABULARY[residue] for residue in STANDARD]
    assert_close(found_LV[:, ours], expected_LV[:, numbers[ours]])
    used = sorted(set(numbers.tolist()))
    log_p_LV = found_LV.log_softmax(-1)
    summed = [log_p_LV[:, numbers == number].logsumexp(-1) for number in used]
    assert_close(torch.stack(summed, -1), expected_LV[:, used].log_softmax(-1))


@ALL
def test_outputs_are_those_of_the_paper(name, tmp_path, in_double):
    example, numbers = FAMILIES[name], FAMILIES[name].numbers()
    weights = example.weights()
    path = example.save(tmp_path / "model", example.tensors(weights))
    if name.startswith("fair_esm1"):
        weights["embed.weight"][VOCABULARY.mask] = 0
    tokens_BL, mask_BL = batch(ROWS, example.frame)
    network = in_double(path)
    assert network.vocabulary == vocabulary_of(example.frame)
    states, maps, logits_BLV = outputs(network, tokens_BL, mask_BL)
    for row, mask_L in enumerate(mask_BL):
        tokens = [numbers[token] for token in tokens_BL[row, mask_L].tolist()]
        expected, map_NHLL, logits_LV = published(example, weights, tokens)
        for found_BLD, state_LD in zip(states, expected, strict=True):
            assert_close(found_BLD[row, mask_L], state_LD)
        for found_BHLL, map_HLL in zip(maps, map_NHLL, strict=True):
            assert_close(found_BHLL[row, :, : len(tokens), : len(tokens)], map_HLL)
        assert_same_probabilities(example, logits_BLV[row, mask_L], logits_LV)


def test_e1_sees_relatives_as_its_paper_says(tmp_path, in_double):
    example, numbers = FAMILIES["e1"], FAMILIES["e1"].numbers()
    weights = example.weights()
    network = in_double(example.save(tmp_path / "model", example.tensors(weights)))
    framed = [batch([row], example.frame)[0][0] for row in (*ROWS, ROWS[0])]
    lengths = [len(one) for one in framed[:4]]
    spans = [*itertools.pairwise(itertools.accumulate(map(len, framed), initial=0))]
    tokens_1L = torch.cat(framed)[None]
    mask_1L = torch.ones_like(tokens_1L).bool()
    # The last protein is a family of its own.
    bounds = Bounds.of(spans, (1, tokens_1L.shape[1]), longest=64, families=[4, 1], running=True)
    with torch.no_grad():
        found = network(tokens_1L, mask_1L, causal=False, bounds=bounds).logits_BLV[0]
        alone = network(framed[4][None], mask_1L[:, : len(framed[4])], causal=False).logits_BLV[0]
    tokens = [numbers[token] for token in tokens_1L[0, : spans[-1][0]].tolist()]
    *_, expected_LV = published(example, weights, tokens, lengths)
    assert_same_probabilities(example, found[: len(tokens)], expected_LV)
    assert_close(found[len(tokens) :], alone)
    context = [Relative(one[2:-2].numpy(), np.arange(len(one) - 4)) for one in framed[:3]]
    start, end = spans[3]
    for tokens_per_batch in (1, 1000):
        within = NetworkInContext(network, context, tokens_per_batch=tokens_per_batch)
        with torch.no_grad():
            query = within(tokens_1L[:, start:end], mask_1L[:, start:end], causal=False)
        assert_close(query.logits_BLV[0], found[start:end])
    too_many = NetworkInContext(network, [context[0]] * 4, tokens_per_batch=100)
    with torch.no_grad(), pytest.raises(UserError, match="5 proteins exceed the 4"):
        too_many(tokens_1L[:, start:end], mask_1L[:, start:end], causal=False)


@pytest.mark.peers
@pytest.mark.parametrize("perturbed", [False, True])
@pytest.mark.parametrize("name", PEERS)
def test_outputs_are_those_of_hugging_face(name, perturbed, tmp_path, in_double):
    import transformers

    example, original = FAMILIES[name], FAMILIES[name].original or FAMILIES[name]
    tensors = original.tensors()
    for one in [key for key in tensors if perturbed and key.endswith("inv_freq")]:
        tensors[one] *= torch.tensor([1.0, 1.1, 0.9, 1.2])
    folder = example.save(tmp_path / "model", None if example.original else tensors)
    whole = original.save(tmp_path / "original", tensors)
    peer: Any = getattr(transformers, PEERS[name]).from_pretrained(
        whole, dtype=torch.float64, attn_implementation="eager"
    )
    tokens_BL, mask_BL = batch(ROWS)
    network = in_double(folder)
    with torch.no_grad():
        out = peer.eval()(
            input_ids=torch.tensor(example.numbers())[tokens_BL],
            attention_mask=mask_BL.long(),
            output_hidden_states=True,
            output_attentions=True,
        )
        if network.rotary is not None and "rotary.frequency" not in network.state_dict():
            # Those of transformers are float32.
            theirs_K = next(v for n, v in peer.named_buffers() if n.endswith("inv_freq"))
            torch.testing.assert_close(network.rotary.frequency.to(theirs_K.dtype), theirs_K)
            network.rotary.frequency.copy_(theirs_K)
    states, maps, logits_BLV = outputs(network, tokens_BL, mask_BL)
    for found_BLD, hidden_BLD in zip(states, out.hidden_states, strict=True):
        assert_close(found_BLD[mask_BL], hidden_BLD[mask_BL])
    for found_BHLL, map_BHLL in zip(maps, out.attentions, strict=True):
        rows = mask_BL[:, None, :, None].expand_as(map_BHLL)
        assert_close(found_BHLL[rows], map_BHLL[rows])
    assert_same_probabilities(example, logits_BLV[mask_BL], out.logits[mask_BL])


_KINDS = ("Model", "ForSequenceClassification", "ForTokenClassification")
ENCODERS = {
    **{f"Esm{kind}": "esm2" for kind in _KINDS},
    **{f"Bert{kind}": "bert" for kind in _KINDS},
    "EsmcModel": "esmc",
}


@pytest.mark.peers
@pytest.mark.parametrize("peer", slow_but(ENCODERS, "EsmModel", "BertForTokenClassification"))
def test_encoders_that_transformers_saves(peer, tmp_path, in_double):
    import transformers

    example = FAMILIES[ENCODERS[peer]]
    whole: Any = getattr(transformers, peer).from_pretrained(
        example.save(tmp_path / "whole"), dtype=torch.float64, attn_implementation="eager"
    )
    whole.save_pretrained(tmp_path / "saved")
    for file in (tmp_path / "whole").glob("vocab.txt"):
        file.rename(tmp_path / "saved" / file.name)
    tokens_BL, mask_BL = batch(ROWS)
    network = in_double(tmp_path / "saved")
    with torch.no_grad():
        rows_BL = torch.tensor(example.numbers())[tokens_BL]
        out = whole.eval()(rows_BL, attention_mask=mask_BL.long(), output_hidden_states=True)
        if peer == "EsmcModel":
            network.rotary.frequency.copy_(whole.rotary_emb.inv_freq)
        layers = range(network.num_layers + 1)
        found = network.hidden_states(tokens_BL, mask_BL, causal=False, layers=layers)
    for number, expected_BLD in zip(layers, out.hidden_states, strict=True):
        assert_close(found[number][mask_BL], expected_BLD[mask_BL])


@pytest.mark.peers
def test_contacts_are_those_of_hugging_face(tmp_path, in_double):
    from transformers import EsmForMaskedLM

    folder, sequence = ESM.save(tmp_path / "esm"), ROWS[0]
    peer = EsmForMaskedLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    model = protlm.load(folder)
    model.network = in_double(folder)
    tokens_BL, mask_BL = batch([sequence])
    with torch.no_grad():
        expected_LL = peer.predict_contacts(tokens_BL, mask_BL.long())[0].numpy()
    head = interop.read(folder).contacts
    regression = SavedFit("", 0, **asdict(head)).regression
    features_HLL = head_features(model, sequence)
    maps = model.attention_maps(model.tokenize([sequence]))
    maps_HLL = torch.cat([maps[n][0, :, 1:-1, 1:-1] for n in sorted(maps)]).numpy()
    # Maps and features are rounded to float32: s - r c / t changes by 4 (s + |f|) roundings at
    # most, and a probability by a quarter of its logit.
    sizes_HLL = maps_HLL + maps_HLL.swapaxes(1, 2) + np.abs(features_HLL)
    condition = float(np.tensordot(np.abs(head.weights), sizes_HLL, axes=1).max())
    bound = error_bound(torch.float32, condition, 1)
    np.testing.assert_allclose(regression.predict(features_HLL), expected_LL, rtol=0, atol=bound)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@ALL
def test_every_tensor_is_used_once(name, tmp_path):
    """Also one of a layer that the model does not have, which is named as it is in the file."""
    example, tensors = FAMILIES[name], FAMILIES[name].tensors()
    used = [one for one in tensors if not re.search("contact|inv_freq|_extra|species|pooler", one)]
    layer = next(one for one in used if re.search(r"\.1\.", one))
    for number, one in enumerate((used[0], layer, next(x for x in used if x.endswith(".bias")))):
        lacking = {key: value for key, value in tensors.items() if key != one}
        with pytest.raises(InputDataError, match=r"lacks [123] tensors? "):
            interop.read(example.save(tmp_path / f"lacking{number}", lacking))
    for number, more in enumerate(("1.adapter.weight", f"9.{layer.partition('.1.')[2]}")):
        extra = f"{layer.partition('.1.')[0]}.{more}"
        path = example.save(tmp_path / f"more{number}", tensors | {extra: torch.zeros(3, 3)})
        with pytest.raises(InputDataError, match=r"that its architecture does not have|two layout"):
            interop.read(path)


@ALL
def test_half_precision_becomes_single(name, tmp_path):
    example = FAMILIES[name]
    found = interop.read(
        example.save(tmp_path / "x", {n: v.half() for n, v in example.tensors().items()})
    )
    wide = {n: v.half().float() for n, v in example.tensors().items()}
    for key, value in interop.read(example.save(tmp_path / "z", wide)).weights.items():
        # Sums of tensors are not rounded to the precision of the file.
        assert torch.equal(found.weights[key].float(), value), key
        assert found.weights[key].dtype == torch.float32 or key == "rotary.frequency"
    assert protlm.load(example.save(tmp_path / "y")).hash


SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    ("esm2", {"model_type": "esm3"}, r"type 'esm3'; protlm reads: ablang, amplify, bert, e1, esm"),
    ("esm2", {"model_type": "base"}, r"type 'base'; protlm reads: ablang, amplify, bert, e1, esm"),
    ("esm2", {"is_folding_model": True}, "is_folding_model=True is not supported"),
    ("esm2", {"vocab_size": 34}, "vocab_size=34 is not supported"),
    ("esm2", {"vocab_size": 446}, "is a SaProt: its 446 tokens .* not support; give an ESM-2"),
    ("esm2", {"hidden_size": "32"}, "hidden_size='32' must be a whole number above 0"),
    ("esm2", {"hidden_size": 64}, "has weights of width 32, and its settings say 64; get both"),
    ("esm2", {"layer_norm_eps": 0}, "layer_norm_eps=0 must be between 0 and 1"),
    ("esm2", {"cls_token_id": 5}, r"cls_token_id=5 is not supported; .*cls_token_id=0 or None"),
    ("esm2", {"eos_token_id": 3}, r"eos_token_id=3 is not supported; .*eos_token_id=2 or None"),
    ("esm2", {"rope_theta": 500_000}, "rope_theta=500000 is not supported"),
    ("esm2", {"rope_scaling": {"factor": 2}}, "rope_scaling=.* is not supported"),
    ("esm2", {"rope_parameters": {"rope_theta": 5e5}}, "rope_parameters=.* is not supported"),
    ("esm2", {"position_embedding_type": "relative"}, "reads models with .*'absolute' or 'rotary'"),
    ("esm2", {"position_embedding_type": "absolute"}, "lacks 1 tensor .*position_embeddings.wei"),
    ("esm2", {"num_hidden_layers": 3}, "the weights of 2 layers, and its settings say 3"),
    ("esm2", {"num_attention_heads": 5}, r"model_dim=32 is not a multiple of model\.num_heads=5"),
    ("esm2", {"num_attention_heads": 8}, "contact head for other than the 16 heads"),
    ("esm2", {"max_position_embeddings": 2}, r"model describes an impossible model: model\.max"),
    ("esm2", {"intermediate_size": 10**9}, "far larger than the weights"),
    ("esmc", {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters=.* is not supported"),
    ("esmc", {"rope_theta": 500}, "rope_theta=500 is not supported"),
    ("esmc", {"num_hidden_layers": 3}, "weights of 2 layers, and its settings say"),
    ("esmc", {"hidden_size": 256}, "weights of width 128, and its settings say 256"),
    ("bert", {"cls_token_id": 3}, "cls_token_id=3 is not supported"),
    ("bert", {"eos_token_id": 1}, "eos_token_id=1 is not supported"),
    ("bert", {"model_type": "roberta"}, "only in fairseq's layout, as that of Sapiens: give"),
    ("roberta", {"alphabet": None}, "alphabet must be a list"),
    ("roberta", {"alphabet": FAMILIES["roberta"].alphabet[:-2]}, "alphabet lacks"),
    ("roberta", {"alphabet": FAMILIES["roberta"].alphabet[::-1]}, "alphabet must be a list"),
    ("roberta", {"architecture": {"family": "GPT"}}, "type 'gpt'; protlm reads"),
    ("roberta", {"layers": 5}, "the weights of 2 layers, and its settings say 5"),
    ("roberta", {"heads": None}, "heads=None must be"),
    ("ablang", {"pad_token_id": 0}, "pad_token_id=0 is not supported"),
    ("ablang", {"hidden_act": "relu"}, "hidden_act='relu' is not supported"),
    ("amplify", {"rms_norm": False}, "rms_norm=False is not supported"),
    ("amplify", {"att_bias": True}, "att_bias=True is not supported"),
    ("amplify", {"ffn_bias": True}, "ffn_bias=True is not supported"),
    ("amplify", {"hidden_act": "relu"}, "hidden_act='relu' is not supported"),
    ("amplify_te", {"num_attention_heads": 5}, "qkv.weight' must have 3 matrices of one size"),
    ("dplm", {"vocab_size": 8229}, "vocab_size=8229 is not supported"),
    ("nv_esm", {"encoder_activation": "relu"}, "encoder_activation='relu' is not supported"),
    ("nv_esm", {"position_embedding_type": "absolute"}, "reads models with .*'rotary'$"),
    ("e1", {"clip_qkv": None}, "clip_qkv=None must be a whole number above 0"),
    ("e1", {"rope_theta_within_seq": 20_000}, "rope_theta_within_seq=20000 is not supported"),
    ("e1", {"gated_mlp": False}, "gated_mlp=False is not supported"),
    ("amplify", {"num_attention_heads": 5}, r"not a multiple of model\.num_heads=5"),
]


@pytest.mark.parametrize("name, changes, message", SETTINGS)
def test_other_settings_are_refused(name, changes, message, tmp_path):
    example, kept = FAMILIES[name], FAMILIES[name].tensors()
    if "architecture" in example.settings and not changes.keys() & example.settings.keys():
        changes = {"architecture": {**example.settings["architecture"], **changes}}
    if "intermediate_size" in changes:
        kept = {one: value for one, value in kept.items() if "contact_head" not in one}
    with pytest.raises(InputDataError, match=message):
        protlm.load(example.save(tmp_path / "model", kept, **changes))


WORDS = "bert.embeddings.word_embeddings.weight"
TYPES = "bert.embeddings.token_type_embeddings.weight"
KEY = "esm.encoder.layer.1.attention.self.key.weight"
# Tensors by name or by the end of it, and the message.
TENSORS: list[tuple[str, str, Tensor, str]] = [
    ("bert", WORDS, torch.zeros(24, WIDTH), r"embedding.weight .* \[24, 32\]"),
    ("bert", WORDS, torch.zeros(26, WIDTH), r"need \[25, 32\]"),
    ("bert", WORDS, torch.zeros(25), r"embedding.weight .* \[25\]"),
    ("bert", "cls.predictions.bias", torch.zeros(()), r"head.bias has the shape \[\]"),
    ("bert", "cls.predictions.bias", torch.zeros(33), r"head.bias has the shape \[33\]"),
    ("bert", TYPES, torch.zeros(0, WIDTH), r"need \[at least 1, 32\]"),
    ("bert", TYPES, torch.zeros(2, 1), r"need \[at least 1, 32\]"),
    ("bert", "position_embeddings.weight", torch.zeros(1, WIDTH), r"need \[64, 32\]"),
    ("esm2", "word_embeddings.weight", torch.zeros(()), r"has the shape \[\]"),
    ("esm2", "word_embeddings.weight", torch.zeros(32, WIDTH), r"has the shape \[32, 32\]"),
    ("esm2", "lm_head.bias", torch.zeros(()), r"has the shape \[\]"),
    ("esm1v", "position_embeddings.weight", torch.zeros(()), r"has the shape \[\]"),
    ("roberta", "embed_positions.weight", torch.zeros(()), r"has the shape \[\]"),
    ("esm2", KEY, torch.ones(WIDTH, WIDTH, dtype=torch.int8), "as torch.int8: quantized models"),
    ("esm2", KEY, torch.ones(2).to(torch.float8_e4m3fn), "as torch.float8_e4m3fn: quantized"),
    ("esm2", KEY, torch.ones(WIDTH, WIDTH, dtype=torch.int64), "as torch.int64: quantized models"),
    ("esm2", KEY, torch.full((WIDTH, WIDTH), torch.nan), "has NaN or infinite numbers in"),
    ("esm2", KEY, torch.ones(WIDTH, 1), r"tensor of blocks\.1\.attention\.key\.weight has the"),
    ("esm2", "1.LayerNorm.bias", torch.ones(WIDTH).int(), r"LayerNorm.bias' as torch\.int32: qua"),
    ("esm2", "inv_freq", torch.ones(4).int(), r"inv_freq' as torch\.int32: quantized models are"),
    ("esm2", "1.attention.self.rotary_embeddings.inv_freq", torch.ones(4), "other rotary frequen"),
    ("esm2", "contact_head.regression.bias", torch.full((1,), torch.nan), "NaN .* .contact_head"),
    ("esm2", "lm_head.decoder.weight", torch.zeros(33, WIDTH), r"decoder\.weight differs from es"),
    ("ablang", "AbHead.decoder.bias", torch.zeros(24), r"differs from AbHead\.bias"),
    ("amplify", "0.ffn.w12.weight", torch.ones(97, WIDTH), "must have 2 matrices of one size"),
    ("amplify", "0.q.weight", torch.ones(2, WIDTH), r"attention.query.weight has the shape"),
    ("nv_esm", "self_attention.layernorm_qkv.bias", torch.ones(97), "must have 3 matrices of one"),
    ("nv_esmc", "1.q_norm.bias", torch.ones(128), "norms of queries and keys that ESM C does not"),
    ("e1", "embed_seq_id.weight", torch.zeros(0, WIDTH), r"need \[at least 1, 32\]"),
    ("e1", "0.norm_attn_norm.self_attn.k_proj.weight", torch.ones(8, WIDTH), "key.weight has the"),
    ("esmc", "0.mlp.gate_proj.weight", torch.ones(()), r"gate.weight has the shape"),
]


@pytest.mark.parametrize("name, end, value, message", TENSORS)
def test_other_tensors_are_refused(name, end, value, message, tmp_path):
    example, tensors = FAMILIES[name], FAMILIES[name].tensors()
    tensors |= {one: value.clone() for one in tensors if one.endswith(end)}
    for copy, first in example.copies.items():
        if first.endswith(end) and copy in tensors and "inv_freq" not in copy:
            del tensors[copy]
    with pytest.raises(InputDataError, match=message):
        protlm.load(example.save(tmp_path / "model", tensors))


def test_the_first_layout_of_nv_esmc_is_refused(tmp_path):
    example = FAMILIES["nv_esmc"]
    tensors = {re.sub(r"(\d\.)", r"\1self_attention.", n): v for n, v in example.tensors().items()}
    with pytest.raises(InputDataError, match=r"as in the first layout of nv_esmc, .* ESM C itself"):
        interop.read(example.save(tmp_path / "first", tensors))


@pytest.mark.parametrize(
    "alphabet, message",
    [
        (BERT[:-1], "lacks 'Y'"),
        (BERT[1:], r"lacks '\[PAD\]'"),
        ([*BERT, "A"], "repeats a token"),
        ([*BERT, "##ing"], "has 1 tokens that protlm lacks, for instance '##ing'"),
    ],
)
def test_other_alphabets_are_refused(alphabet, message, tmp_path):
    folder = FAMILIES["bert"].save(tmp_path / "bert")
    (folder / "vocab.txt").write_text("\n".join(alphabet))
    with pytest.raises(InputDataError, match=message):
        interop.read(folder)


@pytest.mark.parametrize("name, alphabet", [("bert", BERT), ("amplify", AMPLIFY)])
def test_tokenizer_json_is_the_alphabet_too(name, alphabet, tmp_path):
    folder = FAMILIES[name].save(tmp_path / "model")
    expected = interop.read(folder)
    (folder / "vocab.txt").unlink()
    with pytest.raises(InputDataError, match=r"vocab.txt: no such file; give .* the alphabet"):
        interop.read(folder)
    numbers = {token: number for number, token in enumerate(alphabet)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": numbers}}))
    assert_same(interop.read(folder).weights, expected.weights)
    for text, message in (
        ("{", "is not JSON"),
        ('{"model": {}}', "is not the alphabet"),
        ('{"model": {"vocab": {"A": 1}}}', "numbered from 0"),
    ):
        (folder / "tokenizer.json").write_text(text)
        with pytest.raises(InputDataError, match=message):
            interop.read(folder)


DATA = Path(os.environ.get("PROTLM_DATA", "/missing")) / "pretrained"


@pytest.mark.skipif(not DATA.is_dir(), reason="the folder of PROTLM_DATA has no pretrained models")
@pytest.mark.parametrize("chain", ["vh", "vl"])
def test_logits_are_those_of_the_original_library(chain):
    golden = np.load(DATA / "sapiens_golden.npz")
    alphabet = golden["alphabet"].tolist()
    model = protlm.load(DATA / f"sapiens_{chain}.safetensors")
    ours = [VOCABULARY[residue] for residue in STANDARD]
    theirs = [alphabet.index(residue) for residue in STANDARD]
    chosen = [n for n, name in enumerate(golden["chain"]) if name.lower() == chain]
    assert chosen
    for number, form in itertools.product(chosen, ("", "masked_")):
        length = golden["num_tokens"][number]
        letters = [alphabet[token] for token in golden[f"{form}tokens"][number, 1 : length - 1]]
        # The original library reads X as <mask>.
        sequence = "".join("X" if letter == "<mask>" else letter for letter in letters)
        found_LV = model(model.tokenize([sequence])).logits_BLV[0, :, ours].numpy()
        expected_LV = golden[f"{form}logits"][number, :length][:, theirs]
        np.testing.assert_allclose(found_LV, expected_LV, rtol=0, atol=1e-4)
