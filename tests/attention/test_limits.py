"""Limits in which mechanisms are softmax attention, or each other."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from protlm.attention import create, nystromformer
from tests.attention.cases import make_inputs

SIZES = {"num_heads": 2, "head_dim": 8, "model_dim": 16, "max_length": 512}
MODES = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])


def made(name: str, options: dict[str, Any], **sizes: int) -> Any:
    """A mechanism with its initial parameters, in float64."""
    return create(name, options, **{**SIZES, **sizes}).double()


# Options with which every position sees every other of 130, once.
SEES_ALL: list[tuple[str, dict[str, Any]]] = [
    *(("longformer", {"window": 260, "num_global": number}) for number in (0, 1, 5)),
    *(("longformer", {"window": 2, "num_global": number}) for number in (130, 1000)),
    ("long_short", {"rank": 0, "window": 130, "dual_norm": False}),
    # More random blocks than there are: all that are left.
    ("bigbird", {"block_size": 8, "random_blocks": 1000}),
    ("bigbird", {"block_size": 8, "window_blocks": 1, "global_blocks": 0, "random_blocks": 1000}),
    ("bigbird", {"block_size": 4, "global_blocks": 2, "num_global": 9, "random_blocks": 33}),
    # A window over everything.
    ("bigbird", {"block_size": 8, "window_blocks": 67, "random_blocks": 0, "global_blocks": 0}),
    # One block, and global positions that are all there are.
    ("bigbird", {"block_size": 512, "random_blocks": 3}),
    ("bigbird", {"block_size": 8, "num_global": 200, "random_blocks": 0, "global_blocks": 0}),
    ("bigbird", {"block_size": 8, "global_blocks": 20, "random_blocks": 0}),
]


@MODES
@pytest.mark.parametrize("length", [1, 40, 130])
@pytest.mark.parametrize(("name", "options"), SEES_ALL, ids=str)
def test_where_all_is_seen_it_is_softmax(name, options, length, causal):
    """Projections of global tokens start as copies of the others."""
    inputs = make_inputs(length)
    out = inputs.run(made(name, options), causal=causal)
    expected = inputs.run(made("softmax", {}), causal=causal)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("sharing", ["none", "heads", "key_value", "layers"])
def test_as_many_mixtures_as_positions_that_mix_nothing_are_softmax(sharing):
    linformer = made("linformer", {"projected_length": 40, "sharing": sharing}, max_length=40)
    for parameter in linformer.parameters():
        parameter.data.copy_(torch.eye(40))
    inputs = make_inputs(40).without_padding()
    expected = inputs.run(made("softmax", {}), causal=False)
    torch.testing.assert_close(inputs.run(linformer, causal=False), expected)


@pytest.mark.parametrize("num_landmarks", [40, 64])
def test_a_landmark_at_every_position_and_the_true_inverse_are_softmax(num_landmarks, monkeypatch):
    monkeypatch.setattr(nystromformer, "pseudo_inverse", lambda a, _: torch.linalg.pinv(a))
    inputs = make_inputs(40)
    landmarks = made("nystromformer", {"num_landmarks": num_landmarks, "conv_kernel": None})
    expected = inputs.run(made("softmax", {}), causal=False)
    torch.testing.assert_close(inputs.run(landmarks, causal=False), expected)


@MODES
@pytest.mark.parametrize("num_buckets", [1, None])
def test_one_chunk_for_all_is_softmax_of_others_with_shared_queries(causal, num_buckets):
    options = {"chunk": 300, "num_hashes": 2, "num_buckets": num_buckets}
    inputs = make_inputs(257).without_padding()
    logits = inputs.q_BHLK @ F.normalize(inputs.q_BHLK, dim=-1).mT
    if causal:
        logits = logits.masked_fill(torch.ones(257, 257).triu(1).bool(), -1e30)
    # As in the paper: far below all visible logits, far above the hidden ones.
    weights = logits.masked_fill(torch.eye(257).bool(), -1e5).softmax(-1)
    outs = [
        inputs.run(made("reformer", options, max_length=256, seed=seed), causal=causal)
        for seed in (1, 2)
    ]
    torch.testing.assert_close(outs[0], weights @ inputs.v_BHLC, rtol=1e-10, atol=1e-10)
    assert torch.equal(*outs), "hashes matter in a single bucket"


def test_with_many_features_rfa_is_softmax_of_unit_vectors():
    inputs = make_inputs(5).without_padding()
    # Long vectors, so that the 10⁻³ is negligible.
    inputs = inputs._replace(q_BHLK=1e6 * inputs.q_BHLK, k_BHLK=1e6 * inputs.k_BHLK)
    q, k = (F.normalize(x, dim=-1) for x in inputs[:2])
    for causal in (False, True):
        expected = F.scaled_dot_product_attention(q, k, inputs.v_BHLC, is_causal=causal, scale=1.0)
        found = inputs.run(made("rfa", {"num_features": 20_000}, seed=1), causal=causal)
        torch.testing.assert_close(found, expected, rtol=0, atol=3e-2)


@pytest.mark.parametrize("window", [6, 64])
def test_summaries_of_one_position_each_double_the_keys(window):
    options = {"rank": 20, "window": window, "dual_norm": False}
    long_short = made("long_short", options, model_dim=20)
    # P is the identity: summary p has all its weight at position p.
    long_short.projection.data.copy_(torch.eye(20).repeat(1, 2))
    one_hot = 1e3 * torch.eye(20, dtype=torch.float64).expand(3, -1, -1)
    inputs = make_inputs(20).without_padding()._replace(hidden_BLD=one_hot)
    position_L = torch.arange(20)
    start_L1 = (position_L // window * window - window // 2)[:, None]
    is_near = (start_L1 <= position_L) & (position_L < start_L1 + 2 * window)
    logits = inputs.q_BHLK @ inputs.k_BHLK.mT / 8**0.5 + (1.0 + is_near).log()
    expected = logits.softmax(-1) @ inputs.v_BHLC
    torch.testing.assert_close(inputs.run(long_short, causal=False), expected)


def with_parameters(name: str, options: dict[str, Any], *values: Tensor) -> Any:
    """A mechanism with given parameters."""
    mechanism = made(name, options, num_heads=1, max_length=130)
    for parameter, value in zip(mechanism.parameters(), values, strict=True):
        parameter.data = value.double()
    return mechanism


@MODES
def test_attention_free_transformers_are_each_other_with_some_biases(causal):
    u, v, eye = torch.randn(130, 6), torch.randn(130, 6), torch.eye(130)
    inputs = make_inputs(130)
    inputs = inputs._replace(**{name: getattr(inputs, name)[:, :1] for name in inputs._fields[:3]})
    one_key = inputs.k_BHLK.sum(-1, keepdim=True) / 8**0.5
    with_one_key = inputs._replace(k_BHLK=one_key.expand_as(inputs.k_BHLK))
    kernel, shift = torch.randn(1, 7), torch.zeros(1)
    kernel = (kernel - kernel.mean()) / kernel.std(correction=0)
    place_LL = (6 if causal else 3) - (torch.arange(130)[:, None] - torch.arange(130))
    toeplitz = kernel[0, place_LL.clamp(0, 6)] * ((place_LL >= 0) & (place_LL <= 6))
    simple, full = with_parameters("aft_simple", {}), ("aft_full", {"rank": 6})
    pairs = [
        # A window over everything; no biases; one exponent for a head, and biases by distance.
        (with_parameters("aft_local", {"window": 130, "rank": 6}, u, v), inputs),
        (with_parameters(*full, u, v), inputs),
        (with_parameters("aft_local", {"window": 9, "rank": 6}, 0 * u, v), inputs),
        (simple, inputs),
        (with_parameters("aft_conv", {"kernel_size": 7}, kernel, shift, shift), inputs),
        (simple, with_one_key),
        (with_parameters("aft_conv", {"kernel_size": 7}, kernel, shift + 1, shift), inputs),
        (with_parameters("aft_full", {"rank": 130}, toeplitz, eye), with_one_key),
    ]
    outs = [given.run(mechanism, causal=causal) for mechanism, given in pairs]
    for one, other in zip(outs[::2], outs[1::2], strict=True):
        torch.testing.assert_close(one, other)
