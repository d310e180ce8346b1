"""ESM C: outputs are those of its published architecture and of Hugging Face, in three layouts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import protlm
from protlm import interop
from protlm.checkpoints.description import ModelDescription
from protlm.data.vocabulary import VOCABULARY
from protlm.interop import esmc
from protlm.model.transformer import ProteinLM
from protlm.system.errors import InputDataError
from tests.interop.conftest import pairs, random, write_folder
from tests.interop.published import attend, gelu, heads, layer_norm, linear, rotated, silu

LAYERS, WIDTH, HEADS, INNER, ROWS = 2, 128, 2, 96, 64
SETTINGS = {
    "model_type": "esmc",
    "vocab_size": ROWS,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
# Names of the library in those of the layout with fused kernels.
FUSED = {
    "layernorm_qkv.0.weight": "layernorm_qkv.layer_norm_weight",
    "layernorm_qkv.0.bias": "layernorm_qkv.layer_norm_bias",
    "layernorm_qkv.1.weight": "layernorm_qkv.weight",
    "ffn.0.weight": "ffn.layer_norm_weight",
    "ffn.0.bias": "ffn.layer_norm_bias",
    "ffn.1.weight": "ffn.fc1_weight",
    "ffn.3.weight": "ffn.fc2_weight",
}
SEQUENCES = ["MKTVRQERLKXIVBA", "ACDEFGHIKLMNPQRSTVWYU", "W"]


def esmc_tensors() -> dict[str, Tensor]:
    """The names of the library."""
    shapes = {
        "embed.weight": (ROWS, WIDTH),
        "transformer.norm.weight": (WIDTH,),
        **pairs(
            ("sequence_head.0", WIDTH, WIDTH),
            ("sequence_head.2", WIDTH, None),
            ("sequence_head.3", ROWS, WIDTH),
        ),
    }
    for number in range(LAYERS):
        layer = f"transformer.blocks.{number}"
        shapes |= pairs(
            (f"{layer}.attn.layernorm_qkv.0", WIDTH, None), (f"{layer}.ffn.0", WIDTH, None)
        )
        shapes |= {
            f"{layer}.attn.layernorm_qkv.1.weight": (3 * WIDTH, WIDTH),
            f"{layer}.attn.q_ln.weight": (WIDTH,),
            f"{layer}.attn.k_ln.weight": (WIDTH,),
            f"{layer}.attn.out_proj.weight": (WIDTH, WIDTH),
            f"{layer}.ffn.1.weight": (2 * INNER, WIDTH),
            f"{layer}.ffn.3.weight": (WIDTH, INNER),
        }
    return random(shapes)


def library(folder: Path, tensors: dict[str, Tensor] | None = None) -> Path:
    path = folder / "esmc.pth"
    torch.save(tensors or esmc_tensors(), path)
    return path


def fused_name(name: str) -> str:
    for ours, theirs in FUSED.items():
        if name.endswith(ours):
            name = name.removesuffix(ours) + theirs
    return name.replace("sequence_head", "lm_head") if "head" in name else f"esmc.{name}"


def fused(folder: Path) -> Path:
    tensors = {fused_name(name): value for name, value in esmc_tensors().items()}
    name = "esmc.transformer.blocks.0.attn.layernorm_qkv._extra_state"
    tensors[name] = torch.zeros(2, dtype=torch.uint8)
    return write_folder(folder / "fused", SETTINGS, tensors)


def native(folder: Path) -> Path:
    source = esmc_tensors()
    tensors = {
        "esmc.embed_tokens.weight": source["embed.weight"],
        "esmc.norm.weight": source["transformer.norm.weight"],
    }
    for number, name in ((0, "dense"), (2, "layer_norm"), (3, "decoder")):
        for part in ("weight", "bias"):
            tensors[f"lm_head.{name}.{part}"] = source[f"sequence_head.{number}.{part}"]
    for number in range(LAYERS):
        theirs, layer = f"esmc.layers.{number}", f"transformer.blocks.{number}"
        for part in ("weight", "bias"):
            tensors[f"{theirs}.input_layernorm.{part}"] = source[
                f"{layer}.attn.layernorm_qkv.0.{part}"
            ]
            tensors[f"{theirs}.post_attention_layernorm.{part}"] = source[f"{layer}.ffn.0.{part}"]
        qkv = source[f"{layer}.attn.layernorm_qkv.1.weight"].chunk(3)
        gate, up = source[f"{layer}.ffn.1.weight"].chunk(2)
        for name, value in (
            *zip(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), qkv, strict=True),
            ("self_attn.q_norm", source[f"{layer}.attn.q_ln.weight"]),
            ("self_attn.k_norm", source[f"{layer}.attn.k_ln.weight"]),
            ("self_attn.o_proj", source[f"{layer}.attn.out_proj.weight"]),
            ("mlp.gate_proj", gate),
            ("mlp.up_proj", up),
            ("mlp.down_proj", source[f"{layer}.ffn.3.weight"]),
        ):
            tensors[f"{theirs}.{name}.weight"] = value.clone()
    return write_folder(folder / "native", SETTINGS, tensors)


def published(tensors: dict[str, Tensor], tokens: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """The hidden states before and after each block, then logits; and the maps."""
    x = tensors["embed.weight"][tokens]
    divisor = (LAYERS / 36) ** 0.5
    states, maps = [x], []
    for number in range(LAYERS):
        layer = f"transformer.blocks.{number}"
        qkv = f"{layer}.attn.layernorm_qkv"
        y = layer_norm(x, tensors[f"{qkv}.0.weight"], tensors[f"{qkv}.0.bias"])
        q, k, v = linear(y, tensors, f"{qkv}.1").chunk(3, dim=-1)
        q = layer_norm(q, tensors[f"{layer}.attn.q_ln.weight"])
        k = layer_norm(k, tensors[f"{layer}.attn.k_ln.weight"])
        q, k = (rotated(heads(z, HEADS), interleaved=False) for z in (q, k))
        out, map_HLL = attend(q, k, heads(v, HEADS))
        x = x + linear(out, tensors, f"{layer}.attn.out_proj") / divisor
        y = layer_norm(x, tensors[f"{layer}.ffn.0.weight"], tensors[f"{layer}.ffn.0.bias"])
        gate, up = linear(y, tensors, f"{layer}.ffn.1").chunk(2, dim=-1)
        x = x + linear(silu(gate) * up, tensors, f"{layer}.ffn.3") / divisor
        states.append(x)
        maps.append(map_HLL)
    states[-1] = layer_norm(x, tensors["transformer.norm.weight"])
    y = gelu(linear(states[-1], tensors, "sequence_head.0"))
    y = layer_norm(y, tensors["sequence_head.2.weight"], tensors["sequence_head.2.bias"])
    return [*states, linear(y, tensors, "sequence_head.3")], maps


def test_outputs_are_those_of_the_paper(
    tmp_path: Path, in_double: Callable[[Path], ProteinLM]
) -> None:
    path = library(tmp_path)
    batch = protlm.load(path).tokenize(SEQUENCES)
    batch.tokens_BL[1, 3:5] = VOCABULARY.mask
    network = in_double(path)
    with torch.no_grad():
        out = network(batch.tokens_BL, batch.mask_BL, causal=False, layers=range(LAYERS + 1))
        maps = {
            number: network.mechanism(number).attention_map(
                x.q_BHLK, x.k_BHLK, hidden_BLD=x.hidden_BLD, mask_BL=batch.mask_BL, causal=False
            )
            for number, x in network.attention_inputs(batch.tokens_BL, batch.mask_BL, causal=False)
        }
    for row, mask_L in enumerate(batch.mask_BL):
        tokens = batch.tokens_BL[row, mask_L].tolist()
        (*states, logits_LV), map_NHLL = published(esmc_tensors(), tokens)
        for number, state in enumerate(states):
            torch.testing.assert_close(out.hidden[number][row, mask_L], state, rtol=0, atol=1e-10)
        for number, expected_HLL in enumerate(map_NHLL, 1):
            length = len(tokens)
            found_HLL = maps[number][row, :, :length, :length]
            torch.testing.assert_close(found_HLL, expected_HLL, rtol=0, atol=1e-10)
        expected_LV = logits_LV[:, : len(VOCABULARY)]
        torch.testing.assert_close(out.logits_BLV[row, mask_L], expected_LV, rtol=0, atol=1e-10)


@pytest.mark.parametrize("write", [fused, native])
def test_all_layouts_have_the_same_model(write: Callable[[Path], Path], tmp_path: Path) -> None:
    found, expected = interop.read(write(tmp_path)), interop.read(library(tmp_path))
    assert found.description.model == expected.description.model
    assert set(found.weights) == set(expected.weights)
    for name, value in expected.weights.items():
        assert torch.equal(found.weights[name], value), name


@pytest.mark.peers
def test_outputs_are_those_of_hugging_face(
    tmp_path: Path, in_double: Callable[[Path], ProteinLM]
) -> None:
    from transformers import EsmcForMaskedLM

    folder = native(tmp_path)
    peer = EsmcForMaskedLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    batch = protlm.load(folder).tokenize(SEQUENCES)
    batch.tokens_BL[1, 3:5] = VOCABULARY.mask
    network = in_double(folder)
    with torch.no_grad():
        # Its frequencies are float32.
        assert network.rotary is not None
        network.rotary.frequency.copy_(peer.esmc.rotary_emb.inv_freq)
        found = network(batch.tokens_BL, batch.mask_BL, causal=False, layers=range(LAYERS + 1))
        out = peer(batch.tokens_BL, batch.mask_BL.long(), output_hidden_states=True)
    mask_BL = batch.mask_BL
    for number, hidden_BLD in enumerate(out.hidden_states):
        torch.testing.assert_close(
            found.hidden[number][mask_BL], hidden_BLD[mask_BL], rtol=0, atol=1e-10
        )
    expected_NV = out.logits[mask_BL][:, : len(VOCABULARY)]
    torch.testing.assert_close(found.logits_BLV[mask_BL], expected_NV, rtol=0, atol=1e-10)


def test_tensors_that_are_missing_or_left_over_are_named(tmp_path: Path) -> None:
    tensors = esmc_tensors()
    tensors["transformer.blocks.0.geom_attn.s_norm.weight"] = torch.ones(WIDTH)
    with pytest.raises(InputDataError, match=r"geom_attn.* that its architecture does not have"):
        interop.read(library(tmp_path, tensors))
    del tensors["transformer.blocks.0.geom_attn.s_norm.weight"]
    del tensors["transformer.blocks.1.attn.q_ln.weight"]
    with pytest.raises(InputDataError, match=r"lacks 1 tensor \('transformer.blocks.1.attn.q_ln"):
        interop.read(library(tmp_path, tensors))


@pytest.mark.parametrize(
    "setting, value, message",
    [
        ("rope_parameters", {"rope_type": "linear"}, r"rope_parameters=.* is not supported"),
        ("rope_theta", 500, "rope_theta=500 is not supported"),
        ("num_hidden_layers", LAYERS + 1, f"weights of {LAYERS} layers, and its settings say"),
        ("hidden_size", 2 * WIDTH, f"weights of width {WIDTH}, and its settings say {2 * WIDTH}"),
    ],
)
def test_other_settings_are_refused(
    setting: str, value: object, message: str, tmp_path: Path
) -> None:
    folder = native(tmp_path)
    (folder / "config.json").write_text(json.dumps(SETTINGS | {setting: value}))
    with pytest.raises(InputDataError, match=message):
        interop.read(folder)


def test_a_license_that_restricts_users_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = library(tmp_path)
    interop.read(model)
    assert capsys.readouterr().err == ""
    monkeypatch.setitem(esmc._LICENSES, WIDTH, esmc._LICENSES[1152])
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
