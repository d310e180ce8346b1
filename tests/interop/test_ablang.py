"""AbLang: outputs are those of its published architecture; its library is not installed here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import protlm
from protlm import interop
from protlm.data.vocabulary import STANDARD, VOCABULARY
from protlm.interop.ablang import _SPECIAL
from protlm.interop.alphabet import source_tokens
from protlm.model.transformer import ProteinLM
from protlm.system.errors import InputDataError
from tests.interop.conftest import HEADS, INNER, LAYERS, WIDTH, pairs, random
from tests.interop.published import attend, gelu, heads, layer_norm, linear

ALPHABET = ["<", *"MRHKDESTNQCGPAVIFYWL", "-", ">", "*"]
ROWS = 40
SETTINGS = {
    "vocab_size": len(ALPHABET),
    "pad_token_id": ALPHABET.index("-"),
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "max_position_embeddings": ROWS,
    "layer_norm_eps": 1e-5,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
}
EMBEDDINGS = "AbRep.AbEmbeddings"


def ablang_tensors() -> dict[str, Tensor]:
    shapes = {
        f"{EMBEDDINGS}.AAEmbeddings.weight": (len(ALPHABET), WIDTH),
        f"{EMBEDDINGS}.PositionEmbeddings.weight": (ROWS, WIDTH),
        "AbHead.decoder.weight": (len(ALPHABET), WIDTH),
        "AbHead.bias": (len(ALPHABET),),
        **pairs(
            (f"{EMBEDDINGS}.LayerNorm", WIDTH, None),
            ("AbHead.dense", WIDTH, WIDTH),
            ("AbHead.layer_norm", WIDTH, None),
        ),
    }
    for number in range(LAYERS):
        layer = f"AbRep.EncoderBlocks.Layers.{number}"
        shapes |= pairs(
            *(
                (f"{layer}.MultiHeadAttention.Attention.{name}_proj", WIDTH, WIDTH)
                for name in ("q", "k", "v", "out")
            ),
            (f"{layer}.MHALayerNorm", WIDTH, None),
            (f"{layer}.IntermediateLayer.expand_dense", INNER, WIDTH),
            (f"{layer}.IntermediateLayer.dense_dense", WIDTH, INNER),
            (f"{layer}.IntermediateLayer.LayerNorm", WIDTH, None),
        )
    tensors = random(shapes)
    tensors["AbHead.decoder.bias"] = tensors["AbHead.bias"].clone()
    return tensors


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write_one(tensors: dict[str, Tensor] | None = None, **changes: Any) -> Path:
        folder = tmp_path / "ablang"
        folder.mkdir()
        (folder / "hparams.json").write_text(json.dumps(SETTINGS | changes))
        numbers = {token: number for number, token in enumerate(ALPHABET)}
        (folder / "vocab.json").write_text(json.dumps(numbers))
        torch.save(tensors or ablang_tensors(), folder / "amodel.pt")
        return folder

    return write_one


def normed(x: Tensor, tensors: dict[str, Tensor], name: str) -> Tensor:
    return layer_norm(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])


def published(tensors: dict[str, Tensor], tokens: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """The hidden states before and after each block, then logits; and the maps."""
    # Positions count from 1; row 0 is that of padding.
    positions = tensors[f"{EMBEDDINGS}.PositionEmbeddings.weight"][1 : len(tokens) + 1]
    x = tensors[f"{EMBEDDINGS}.AAEmbeddings.weight"][tokens] + positions
    x = normed(x, tensors, f"{EMBEDDINGS}.LayerNorm")
    states, maps = [x], []
    for number in range(LAYERS):
        layer = f"AbRep.EncoderBlocks.Layers.{number}"
        attention = f"{layer}.MultiHeadAttention.Attention"
        q, k, v = (heads(linear(x, tensors, f"{attention}.{n}_proj"), HEADS) for n in "qkv")
        out, map_HLL = attend(q, k, v)
        x = normed(
            linear(out, tensors, f"{attention}.out_proj") + x, tensors, f"{layer}.MHALayerNorm"
        )
        inner = f"{layer}.IntermediateLayer"
        y = linear(
            gelu(linear(x, tensors, f"{inner}.expand_dense")), tensors, f"{inner}.dense_dense"
        )
        x = normed(y + x, tensors, f"{inner}.LayerNorm")
        states.append(x)
        maps.append(map_HLL)
    y = normed(gelu(linear(x, tensors, "AbHead.dense")), tensors, "AbHead.layer_norm")
    return [*states, linear(y, tensors, "AbHead.decoder")], maps


def test_outputs_are_those_of_the_paper(
    write: Callable[..., Path], in_double: Callable[[Path], ProteinLM]
) -> None:
    folder = write()
    ids = source_tokens(folder, ALPHABET, _SPECIAL, {})
    model = protlm.load(folder)
    assert model.max_length == ROWS - 1
    batch = model.tokenize(["EVQLVESGGGLVQPGG", "EVXLVESGGG", "W"])
    batch.tokens_BL[0, 3:5] = VOCABULARY.mask
    network = in_double(folder)
    with torch.no_grad():
        out = network(batch.tokens_BL, batch.mask_BL, causal=False, layers=range(LAYERS + 1))
        maps = {
            number: network.mechanism(number).attention_map(
                x.q_BHLK, x.k_BHLK, hidden_BLD=x.hidden_BLD, mask_BL=batch.mask_BL, causal=False
            )
            for number, x in network.attention_inputs(batch.tokens_BL, batch.mask_BL, causal=False)
        }
    for row, mask_L in enumerate(batch.mask_BL):
        tokens = [ids[token] for token in batch.tokens_BL[row, mask_L].tolist()]
        (*states, logits_LV), map_NHLL = published(ablang_tensors(), tokens)
        for number, state in enumerate(states):
            torch.testing.assert_close(out.hidden[number][row, mask_L], state, rtol=0, atol=1e-10)
        for number, expected_HLL in enumerate(map_NHLL, 1):
            length = len(tokens)
            found_HLL = maps[number][row, :, :length, :length]
            torch.testing.assert_close(found_HLL, expected_HLL, rtol=0, atol=1e-10)
        found_LV = out.logits_BLV[row, mask_L][:, [VOCABULARY[a] for a in STANDARD]]
        expected_LV = logits_LV[:, [ALPHABET.index(a) for a in STANDARD]]
        torch.testing.assert_close(found_LV, expected_LV, rtol=0, atol=1e-10)


def test_a_missing_tensor_or_file_is_named(write: Callable[..., Path]) -> None:
    tensors = ablang_tensors()
    del tensors["AbHead.dense.bias"]
    folder = write(tensors)
    with pytest.raises(InputDataError, match=r"lacks 1 tensor \('AbHead.dense.bias'\)"):
        interop.read(folder)
    (folder / "amodel.pt").unlink()
    with pytest.raises(InputDataError, match=r"amodel.pt: no such file; .* weights of AbLang"):
        interop.read(folder)


def test_an_output_layer_with_two_biases_is_refused(write: Callable[..., Path]) -> None:
    tensors = ablang_tensors()
    tensors["AbHead.decoder.bias"] += 1
    with pytest.raises(InputDataError, match=r"differs from AbHead\.bias"):
        interop.read(write(tensors))


@pytest.mark.parametrize("changes", [{"pad_token_id": 0}, {"hidden_act": "relu"}])
def test_other_settings_are_refused(changes: dict[str, object], write: Callable[..., Path]) -> None:
    with pytest.raises(InputDataError, match=f"{next(iter(changes))}=.* is not supported"):
        interop.read(write(**changes))
