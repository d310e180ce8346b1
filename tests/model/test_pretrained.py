"""The Python interface, from sequences to logits, hidden states and maps, and its memory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import protlm
from protlm.attention import names
from protlm.attention.hybrid import Hybrid
from protlm.attention.linearized.variance import SquareNorms, pair_sums, relative_error
from protlm.interface import Model
from protlm.model import memory
from protlm.model.memory import Room, TensorMemory, _peak, extrapolate
from protlm.model.pretrained import PretrainedModel
from protlm.model.transformer import build_network
from protlm.system.errors import UserError
from tests.marks import slow_but
from tests.small_models import small_model

SEQUENCES = ["MKTAYIAKQRQISFVKSHFSRQ", "ACDEFGHIKLMNPQRSTVWYXBZUO", "M"]


@pytest.fixture(scope="module")
def model(tiny_run: Path) -> PretrainedModel:
    return protlm.load(tiny_run)


def test_tokens_are_cls_residues_eos(model):
    batch = model.tokenize(["MK", "A"])
    assert batch.tokens_BL.tolist() == [[0, 20, 15, 2], [0, 5, 2, 1]]
    assert batch.mask_BL.tolist() == [[True] * 4, [True, True, True, False]]
    assert (len(batch), batch.lengths) == (2, (2, 1))


def test_layers_are_numbered_from_the_embedding_and_from_the_end(model):
    out = model(model.tokenize(SEQUENCES), layers=[0, 2, -1])
    assert set(out.hidden) == {0, 2, -1}
    assert out.hidden[2].equal(out.hidden[-1])
    with pytest.raises(UserError, match="layer 3 does not exist; this model has 0 to 2"):
        model(model.tokenize(SEQUENCES), layers=[3])


def test_chosen_heads_layers_and_blocks_are_parts_of_the_whole(model):
    batch = model.tokenize(SEQUENCES)
    whole = model.attention_maps(batch)
    part = model.attention_maps(batch, layers=-1, heads=2)
    assert set(part) == {-1}, "as it was asked for, like the hidden states"
    assert part[-1].equal(whole[2][:, [1]])
    assert model.attention_maps(batch, layers=[]) == {}
    blocks = [m for n, _, m in model.attention_row_blocks(batch, [2], None, block=5)]
    torch.testing.assert_close(torch.cat(blocks, dim=2), whole[2])
    for kind, number in (("head", 3), ("layer", 0)):
        with pytest.raises(UserError, match=f"{kind} {number} does not exist; this model has 1 to"):
            model.attention_maps(batch, **{f"{kind}s": [number]})


def test_random_weights_are_the_same_architecture(model):
    floor = model.with_random_weights(3)
    assert floor.hash not in (model.hash, model.with_random_weights(4).hash)
    assert floor.hash == model.with_random_weights(3).hash
    assert (floor.num_layers, floor.num_heads) == (model.num_layers, model.num_heads)


@pytest.mark.parametrize(
    "attention, first",
    [
        ({"name": "performer_softmax"}, 0),
        ({"name": "hybrid", "local_heads": 1, "mechanism": "performer_softmax"}, 1),
    ],
)
def test_estimate_errors_are_those_of_the_heads_of_favor(attention, first, model):
    """Of all heads of a layer, or of a hybrid's linear heads."""
    assert model.estimate_errors(model.tokenize(SEQUENCES)) == {}, "it has no FAVOR+"
    described = small_model("softmax").description
    config = replace(described.model, num_heads=4, qk_norm=not first)
    # In float64 the bounds of `assert_close` are 10^8 roundings wide.
    network = build_network(config, attention, seed=1).double()
    estimating = Model(network, described, rebuild=lambda _: network)
    batch = estimating.tokenize(SEQUENCES)
    errors = estimating.estimate_errors(batch)
    assert set(errors) == {1, 2}
    for number, x in network.attention_inputs(batch.tokens_BL, batch.mask_BL, causal=False):
        mechanism = network.mechanism(number)
        linear = mechanism.linear if isinstance(mechanism, Hybrid) else mechanism
        q_BHLK, k_BHLK = x.q_BHLK[:, first:], x.k_BHLK[:, first:]
        norms = SquareNorms.of(pair_sums(q_BHLK, k_BHLK, batch.mask_BL, causal=False))
        assert errors[number][0].shape == (4 - first,)
        torch.testing.assert_close(errors[number][0], norms.sum_H)
        torch.testing.assert_close(errors[number][1], relative_error(linear, norms))
        if not first:
            # Norms of 1 bound |q̂ + k̂|² by 4, and so the error of 256 features.
            assert (errors[number][0] > 0).all() and (errors[number][0] <= 4.1).all()
            assert (errors[number][1] > 0).all() and (errors[number][1] < 0.5).all()


def test_learned_positions_bound_the_length():
    bounded = small_model("softmax", max_length=128)
    bounded.tokenize(["A" * 126])
    with pytest.raises(UserError, match="127 residues is longer than the 126"):
        bounded.tokenize(["A" * 127])


def test_the_peak_is_that_of_the_tensors_in_use():
    x = torch.ones(1000)
    with TensorMemory() as memory:
        a = x + 1
        b = a * 2
        del a
        # A view has no memory of its own.
        c = b.view(10, 100).T
        d = c + 1
        del b, c, d
        x += 1
    assert memory.peak == 2 * 4000


FAST = ("hybrid", "longformer", "reformer")
LONG = [(name, 4096, 0.15) for name in names()]


@pytest.mark.parametrize(
    ("mechanism", "length", "precision"),
    # A model with few positions is measured.
    [("softmax", 126, 0.05), *slow_but(LONG, *(x for x in LONG if x[0] in FAST))],
)
def test_long_proteins_are_extrapolated(mechanism, length, precision):
    found = small_model(mechanism, max_length=length + 2)
    # So wide that the features of a tile are not most of the memory.
    config = replace(found.description.model, num_heads=4, model_dim=128, feedforward_dim=344)
    network = build_network(config, {"name": mechanism}, seed=0)
    described = replace(found.description, model=config)
    model = PretrainedModel(network, described, rebuild=lambda _: network)
    assert model.max_residues == length
    # Lengths are not multiples of the sizes of blocks.
    assert Room(model).needs(length) == pytest.approx(_peak(model, length), rel=precision)


def test_two_lengths_give_a_line_and_three_a_parabola():
    assert extrapolate({1024: 1030, 2048: 2054}, 35_000) == 35_006
    assert extrapolate({n: 3 * n**2 + n for n in (512, 1024, 2048)}, 8000) == 192_008_000


def test_a_square_of_the_length_is_seen(monkeypatch):
    model = small_model("softmax")
    monkeypatch.setattr(memory, "_peak", lambda _, length, training: 7 * length**2 + 100 * length)
    assert [Room(model).needs(length) for length in (10, 5000)] == [1700, 175_500_000]
