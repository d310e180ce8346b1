"""Models with another attention: what is kept, what is new, and how close the outputs are."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import protlm
from protlm.attention.hedgehog import Hedgehog
from protlm.build import describe
from protlm.checkpoints.description import ModelDescription
from protlm.checkpoints.format import Checkpoint, export
from protlm.commands import checkpoint as command
from protlm.config import TrainConfig
from protlm.config.composition import compose, to_plain
from protlm.conversion import convert
from protlm.loading import load_model, model_of
from protlm.model.transformer import build_network
from protlm.system.errors import UserError
from tests.fixtures.commands import SHORT_TRAINING, commands_of

DOCUMENT = Path(__file__).parents[1] / "docs" / "linearize.md"
SEQUENCES = ["MKTAYIAKQRQISFVKSHFSRQLEERLG", "MKVL", "GSHMLEDPVDAYWQ"]


@pytest.fixture
def untrained(tmp_path: Any) -> Callable[..., Checkpoint]:
    """A tiny model with small queries and keys; by default of softmax attention."""

    def make(*overrides: str) -> Checkpoint:
        settings = ["model=tiny", "attention=softmax", "run_dir=run", *overrides]
        config = compose(TrainConfig, settings)
        weights = build_network(config.model, config.attention, seed=1).state_dict()
        for name, value in weights.items():
            if name.endswith(("attention.query.weight", "attention.key.weight")):
                value.mul_(0.5)
        return Checkpoint(tmp_path, describe(config), weights)

    return make


def options(name: str, **chosen: object) -> dict[str, Any]:
    typed = [f"attention={name}", *(f"attention.{key}={value}" for key, value in chosen.items())]
    return to_plain(compose(TrainConfig, typed))["attention"]


def logits(checkpoint: Checkpoint) -> Tensor:
    model = model_of(checkpoint)
    batch = model.tokenize(SEQUENCES)
    model.network.double()
    return model(batch).logits_BLV[batch.mask_BL]


def queries_and_keys(checkpoint: Checkpoint) -> tuple[Tensor, Tensor]:
    model = model_of(checkpoint)
    batch = model.tokenize(SEQUENCES)
    inputs = model.network.attention_inputs(batch.tokens_BL, batch.mask_BL, causal=False)
    _, first = next(iter(inputs))
    return first.q_BHLK, first.k_BHLK


def test_all_other_weights_are_kept(untrained):
    original = untrained()
    done = convert(original, options("hedgehog"), seed=None)
    maps = [f"blocks.*.attention.mechanism.{name}_map" for name in ("query", "key")]
    assert done.initialized == tuple(maps)
    assert done.left_out == ()
    new = done.checkpoint.weights
    assert all(torch.equal(new[name], value) for name, value in original.weights.items())
    described = done.checkpoint.description
    assert (described.attention, described.attention_options) == ("hedgehog", {})
    assert described.model == original.description.model
    source = {"converted_from": "softmax", "converted_hash": model_of(original).hash}
    assert described.source == source
    assert ModelDescription.parse(original.path, described.to_plain()) == described


@pytest.mark.slow
def test_favor_approaches_the_logits_of_softmax(untrained):
    original = untrained()
    exact = logits(original)

    def error(num_features: int) -> float:
        chosen = options("performer_softmax", num_features=num_features)
        squares = [
            (logits(convert(original, chosen, seed=seed).checkpoint) - exact).square().sum()
            for seed in range(4)
        ]
        return float(torch.stack(squares).mean().sqrt() / exact.norm())

    # The error is proportional to R^(-1/2): 16 times the features are a quarter of it.
    few, many = error(64), error(1024)
    assert many < few / 2
    assert error(8192) < many / 2


def test_weights_without_a_use_are_named(untrained):
    # Performers have bounded norms of queries and keys, and softmax has free ones.
    done = convert(untrained("model.qk_norm=true"), options("performer_relu"), seed=None)
    assert done.left_out == tuple(f"blocks.*.attention.{x}_norm.gain" for x in ("query", "key"))
    assert done.initialized == tuple(f"blocks.*.attention.{x}_norm.scale" for x in ("query", "key"))
    model_of(done.checkpoint)
    back = convert(done.checkpoint, options("softmax"), seed=None)
    assert (back.initialized, back.left_out[:1]) == (
        (),
        ("blocks.*.attention.mechanism.redraw_index",),
    )
    torch.testing.assert_close(*map(queries_and_keys, (done.checkpoint, back.checkpoint)))


@pytest.mark.parametrize("bounded", [False, True])
def test_exact_heads_of_a_hybrid_keep_the_norms_of_softmax(bounded, untrained):
    """A bounded norm, too, becomes the free one that gives the same queries and keys."""
    original = untrained(
        "model.qk_norm=true", f"attention.bounded_qk_norm={bounded}", "model.num_layers=1"
    )
    parts = [v for n, v in original.weights.items() if n.endswith(("_norm.gain", "_norm.scale"))]
    assert len(parts) == 2
    for part in parts:
        part.copy_(torch.linspace(0.5, 2.0, len(part)))
    done = convert(original, options("hybrid"), seed=None)
    scales = [f"blocks.*.attention.{x}_norm.linear.scale" for x in ("query", "key")]
    norms = tuple(name for name in done.initialized if "_norm" in name)
    assert norms == (() if bounded else tuple(scales))
    heads = slice(None) if bounded else slice(1)
    for before, after in zip(*map(queries_and_keys, (original, done.checkpoint)), strict=True):
        torch.testing.assert_close(before[:, heads], after[:, heads])


def test_a_second_conversion_keeps_the_first_origin(untrained):
    first = untrained()
    imported = {"family": "bert", "sha256": "0" * 64}
    described = ModelDescription(**{**vars(first.description), "source": imported})
    done = convert(Checkpoint(first.path, described, first.weights), options("hedgehog"), seed=None)
    assert done.checkpoint.description.source == {
        **imported,
        "converted_from": "softmax",
        "converted_hash": model_of(first).hash,
    }


def test_parameters_that_layers_share_are_exported(untrained, tmp_path):
    done = convert(untrained(), options("linformer"), seed=None)
    export(done.checkpoint, tmp_path / "new")
    assert load_model(tmp_path / "new").hash == model_of(done.checkpoint).hash


@pytest.mark.parametrize(
    "before, after, message",
    [
        ("softmax", "reformer", "softmax to reformer: the keys of reformer are its queries"),
        ("reformer", "softmax", "reformer to softmax: the keys of reformer are its queries"),
        (
            "hybrid attention.local_heads=2 model.qk_norm=true model.num_heads=8",
            "hybrid",
            r"attention=hybrid: the tensor of blocks.0.\S*exact.gain has the shape .2., and its",
        ),
        ("softmax objective=causal", "linformer", "linformer does not support objective=causal"),
    ],
)
def test_a_mechanism_that_does_not_fit_is_refused(before, after, message, untrained):
    original = untrained(*f"attention={before}".split())
    with pytest.raises(UserError, match=message):
        convert(original, options(after), seed=None)


def test_missing_options_are_the_defaults(untrained):
    original = untrained("attention=softmax")
    described = replace(original.description, attention_options={})
    imported = Checkpoint(original.path, described, original.weights)
    with pytest.raises(UserError, match="already has attention=softmax with these options"):
        convert(imported, options("softmax"), seed=None)
    convert(imported, {**options("softmax"), "bounded_qk_norm": True}, seed=None)
    narrow = untrained("attention=hybrid", "attention.window=8").description
    typed = command._mechanism(narrow, "hybrid", ["+options.decay=learned"])
    asked = compose(TrainConfig, typed).attention
    assert (asked["window"], asked["options"]) == (8, {"decay": "learned"})


@pytest.mark.slow
def test_the_commands_of_the_document(protlm_in_process, train, tiny_data, tmp_path):
    train("runs/softmax", "attention=softmax", "trainer.max_steps=2")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").symlink_to(tiny_data)
    commands = commands_of(DOCUMENT)
    assert len(commands) == 10
    printed = {}
    for _, *words in commands:
        few = ["4" if word == "5000" else word for word in words]
        short = ("model=tiny", *SHORT_TRAINING) if words[0] == "train" else ()
        done = protlm_in_process(*few, *short, cwd=tmp_path)
        printed[words[-1]] = done
    swap = printed["runs/swapped"]
    assert swap.stdout == "runs/swapped\n"
    maps = (f"blocks.*.attention.mechanism.{name}_map" for name in ("query", "key"))
    assert swap.stderr == f"initialized: {', '.join(maps)}\nleft out: none\n"
    assert isinstance(protlm.load(tmp_path / "runs" / "linear").network.mechanism(1), Hedgehog)
    favor = protlm.load(tmp_path / "runs" / "favor").description.attention_options
    assert (favor["num_features"], favor["redraw_every"]) == (512, None)
    info = protlm_in_process("checkpoint", "info", "runs/favor", cwd=tmp_path).stdout
    assert re.search(r"source.converted_from +softmax", info)
    original = protlm.load(tmp_path / "runs" / "softmax").hash
    assert re.search(rf"source.converted_hash +{original}", info)
