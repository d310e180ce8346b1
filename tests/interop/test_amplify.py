"""AMPLIFY: outputs are those of its published architecture; its library is not installed here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import protlm
from protlm import interop
from protlm.data.vocabulary import VOCABULARY
from protlm.interop.alphabet import source_tokens
from protlm.interop.amplify import _LEFT_OUT, _SPECIAL
from protlm.model.transformer import ProteinLM
from protlm.system.errors import InputDataError
from tests.interop.conftest import HEADS, INNER, LAYERS, WIDTH, random, write_folder
from tests.interop.published import attend, heads, linear, rms_norm, rotated, silu

ALPHABET = ["<pad>", "<unk>", "<mask>", "<bos>", "<eos>", "|", *"LAGVSERTIDPKQNFYMHWCB"]
SETTINGS = {
    "model_type": "AMPLIFY",
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 72,
    "hidden_act": "SwiGLU",
    "norm_eps": 1e-5,
    "max_length": 64,
    "vocab_size": len(ALPHABET),
}
SEQUENCES = ["MKTVRQERLKXIVBA", "ACDEFGHIKLMNPQRSTVWYU", "W"]


def amplify_tensors() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "encoder.weight": (len(ALPHABET), WIDTH),
        "layer_norm_2.weight": (WIDTH,),
        "decoder.weight": (len(ALPHABET), WIDTH),
        "decoder.bias": (len(ALPHABET),),
    }
    for number in range(LAYERS):
        layer = f"transformer_encoder.{number}"
        shapes |= {f"{layer}.{name}.weight": (WIDTH, WIDTH) for name in ("q", "k", "v", "wo")}
        shapes |= {f"{layer}.{name}_norm.weight": (WIDTH,) for name in ("attention", "ffn")}
        shapes[f"{layer}.ffn.w12.weight"] = (2 * INNER, WIDTH)
        shapes[f"{layer}.ffn.w3.weight"] = (WIDTH, INNER)
    return random(shapes)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write_one(tensors: dict[str, Tensor] | None = None, **changes: Any) -> Path:
        folder = write_folder(
            tmp_path / "amplify", SETTINGS | changes, tensors or amplify_tensors()
        )
        numbers = {token: number for number, token in enumerate(ALPHABET)}
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": numbers}}))
        return folder

    return write_one


def published(tensors: dict[str, Tensor], tokens: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """The hidden states before and after each block, then logits; and the maps."""
    x = tensors["encoder.weight"][tokens]
    states, maps = [x], []
    for number in range(LAYERS):
        layer = f"transformer_encoder.{number}"
        y = rms_norm(x, tensors[f"{layer}.attention_norm.weight"])
        q, k, v = (heads(linear(y, tensors, f"{layer}.{name}"), HEADS) for name in "qkv")
        out, map_HLL = attend(rotated(q, interleaved=True), rotated(k, interleaved=True), v)
        x = x + linear(out, tensors, f"{layer}.wo")
        y = rms_norm(x, tensors[f"{layer}.ffn_norm.weight"])
        gate, up = linear(y, tensors, f"{layer}.ffn.w12").chunk(2, dim=-1)
        x = x + linear(silu(gate) * up, tensors, f"{layer}.ffn.w3")
        states.append(x)
        maps.append(map_HLL)
    states[-1] = rms_norm(x, tensors["layer_norm_2.weight"])
    return [*states, linear(states[-1], tensors, "decoder")], maps


def test_outputs_are_those_of_the_paper(
    write: Callable[..., Path], in_double: Callable[[Path], ProteinLM]
) -> None:
    folder = write()
    ids = source_tokens(folder, ALPHABET, _SPECIAL, {}, left_out=_LEFT_OUT)
    batch = protlm.load(folder).tokenize(SEQUENCES)
    batch.tokens_BL[1, 3:5] = VOCABULARY.mask
    network = in_double(folder)
    with torch.no_grad():
        out = network(batch.tokens_BL, batch.mask_BL, causal=False, layers=range(LAYERS + 1))
    for row, mask_L in enumerate(batch.mask_BL):
        tokens = [ids[token] for token in batch.tokens_BL[row, mask_L].tolist()]
        (*states, logits_LV), _ = published(amplify_tensors(), tokens)
        for number, state in enumerate(states):
            torch.testing.assert_close(out.hidden[number][row, mask_L], state, rtol=0, atol=1e-10)
        standard = [ALPHABET.index(a) for a in "ACDEFGHIKLMNPQRSTVWY"]
        ours = [VOCABULARY[a] for a in "ACDEFGHIKLMNPQRSTVWY"]
        torch.testing.assert_close(
            out.logits_BLV[row, mask_L][:, ours], logits_LV[:, standard], rtol=0, atol=1e-10
        )


def test_maps_are_those_of_the_paper(write: Callable[..., Path]) -> None:
    folder = write()
    ids = source_tokens(folder, ALPHABET, _SPECIAL, {}, left_out=_LEFT_OUT)
    model = protlm.load(folder)
    batch = model.tokenize(SEQUENCES[:1])
    _, expected = published(amplify_tensors(), [ids[t] for t in batch.tokens_BL[0].tolist()])
    for number, maps in model.attention_maps(batch).items():
        torch.testing.assert_close(maps[0].double(), expected[number - 1], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name, message",
    [
        ("decoder.bias", "lacks 1 tensor"),
        ("transformer_encoder.1.ffn.w12.weight", "lacks 2 tensors"),
    ],
)
def test_a_missing_tensor_is_named(name: str, message: str, write: Callable[..., Path]) -> None:
    tensors = amplify_tensors()
    del tensors[name]
    with pytest.raises(InputDataError, match=message):
        interop.read(write(tensors))


@pytest.mark.parametrize(
    "changes",
    [{"rms_norm": False}, {"att_bias": True}, {"hidden_act": "relu"}, {"ffn_bias": True}],
)
def test_other_settings_are_refused(changes: dict[str, object], write: Callable[..., Path]) -> None:
    with pytest.raises(InputDataError, match=f"{next(iter(changes))}=.* is not supported"):
        interop.read(write(**changes))


def test_tensors_left_over_or_of_another_shape_are_refused(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(InputDataError, match=r"'layer_norm_1.weight'.* does not have"):
        interop.read(write(amplify_tensors() | {"layer_norm_1.weight": torch.ones(WIDTH)}))
    odd = {"transformer_encoder.0.ffn.w12.weight": torch.ones(2 * INNER + 1, WIDTH)}
    folder = write_folder(tmp_path / "odd", SETTINGS, amplify_tensors() | odd)
    with pytest.raises(InputDataError, match="must have 2 matrices of one size"):
        interop.read(folder)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "is not JSON"),
        ('{"model": {}}', "is not the alphabet"),
        ('{"model": {"vocab": {"A": 1}}}', "numbered from 0"),
    ],
)
def test_a_damaged_alphabet_is_refused(text: str, message: str, write: Callable[..., Path]) -> None:
    folder = write()
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(InputDataError, match=message):
        interop.read(folder)
