"""Models of other programs, tiny and with random weights, in the layout of the released ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from protlm import interop
from protlm.model.network import build_network
from protlm.model.transformer import ProteinLM

LAYERS, WIDTH, HEADS, INNER = 2, 32, 4, 48

ESM = {
    "model_type": "esm",
    "architectures": ["EsmForMaskedLM"],
    "vocab_size": 33,
    "pad_token_id": 1,
    "mask_token_id": 32,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "max_position_embeddings": 1026,
    "position_embedding_type": "rotary",
    "layer_norm_eps": 1e-5,
    "emb_layer_norm_before": False,
    "token_dropout": True,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "is_folding_model": False,
    "esmfold_config": None,
    "vocab_list": None,
}


def pairs(*modules: tuple[str, int, int | None]) -> dict[str, tuple[int, ...]]:
    """The shapes of weights and biases, from the modules' widths; a norm has one."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, out, inner in modules:
        shapes[f"{name}.weight"] = (out,) if inner is None else (out, inner)
        shapes[f"{name}.bias"] = (out,)
    return shapes


def attention(prefix: str) -> dict[str, tuple[int, ...]]:
    return pairs(
        *((f"{prefix}.attention.self.{n}", WIDTH, WIDTH) for n in ("query", "key", "value")),
        (f"{prefix}.attention.output.dense", WIDTH, WIDTH),
        (f"{prefix}.intermediate.dense", INNER, WIDTH),
        (f"{prefix}.output.dense", WIDTH, INNER),
    )


def random(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Float64 weights that keep the hidden states of a few layers at a norm of about 1."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
        for name, shape in shapes.items()
    }


def esm_tensors() -> dict[str, Tensor]:
    """ESM-2 as it is released: frequencies in every layer, and the tied matrix twice."""
    shapes = {"esm.embeddings.word_embeddings.weight": (33, WIDTH)}
    shapes |= pairs(
        ("esm.encoder.emb_layer_norm_after", WIDTH, None),
        ("esm.contact_head.regression", 1, LAYERS * HEADS),
        ("lm_head.dense", WIDTH, WIDTH),
        ("lm_head.layer_norm", WIDTH, None),
    )
    shapes["lm_head.bias"] = (33,)
    for number in range(LAYERS):
        layer = f"esm.encoder.layer.{number}"
        shapes |= attention(layer)
        shapes |= pairs(
            (f"{layer}.attention.LayerNorm", WIDTH, None), (f"{layer}.LayerNorm", WIDTH, None)
        )
    tensors = random(shapes)
    pair = torch.arange(0, WIDTH // HEADS, 2, dtype=torch.float64)
    frequency = 10_000.0 ** (-pair * HEADS / WIDTH)
    for number in range(LAYERS):
        name = f"esm.encoder.layer.{number}.attention.self.rotary_embeddings.inv_freq"
        tensors[name] = frequency.half().float()
    tensors["lm_head.decoder.weight"] = tensors["esm.embeddings.word_embeddings.weight"].clone()
    return tensors


def write_folder(folder: Path, settings: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Writes the folder of a Hugging Face model."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def write_esm(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny ESM-2: `write_esm("name", changed_setting=..., tensors=...)`."""

    def write(
        name: str = "esm", *, tensors: dict[str, Tensor] | None = None, **changes: Any
    ) -> Path:
        return write_folder(tmp_path / name, ESM | changes, tensors or esm_tensors())

    return write


@pytest.fixture
def esm2_8m(tmp_path: Path) -> Path:
    """An ESM-2 of 8M with random weights, as transformers writes it."""
    from transformers import EsmConfig, EsmForMaskedLM

    config = EsmConfig(
        vocab_size=33,
        pad_token_id=1,
        mask_token_id=32,
        hidden_size=320,
        num_hidden_layers=6,
        num_attention_heads=20,
        intermediate_size=1280,
        max_position_embeddings=1026,
        position_embedding_type="rotary",
        layer_norm_eps=1e-5,
        emb_layer_norm_before=False,
        token_dropout=True,
    )
    EsmForMaskedLM(config).save_pretrained(tmp_path / "esm2_t6_8M_UR50D")
    return tmp_path / "esm2_t6_8M_UR50D"


@pytest.fixture
def in_double(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], ProteinLM]:
    """Builds the network of a foreign model in float64; `x.float()` is float64 from then on.

    Both programs round the angles of positions to float32.
    """

    def build(path: Path) -> ProteinLM:
        found = interop.read(path)
        described = found.description
        network = build_network(described.model, described.attention_config, seed=0).double()
        network.load_state_dict(found.weights)
        monkeypatch.setattr(Tensor, "float", Tensor.double)
        return network.eval()

    return build
