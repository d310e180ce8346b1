"""Biases of offsets: added in blocks of queries, as the formula of all pairs has them."""

import math
from dataclasses import replace

import pytest
import torch

from protlm.attention import softmax
from protlm.attention.base import Context
from protlm.checkpoints.description import ModelDescription, differences
from protlm.config import ModelConfig, Objective, Positions
from protlm.model.memory import Room, TensorMemory
from protlm.model.pooling import residue_means
from protlm.model.positions import RelativeBias
from protlm.model.pretrained import PretrainedModel
from protlm.model.transformer import build_network

CONFIG = ModelConfig(1, 2, 8, 8, 64, Positions.relative, relative_buckets=8, relative_distance=20)


def bucket(offset: int) -> int:
    """Of 8 buckets up to a distance of 20: 0, 1, and two that share the distances from 2 on."""
    far = 2 + math.floor(2 * math.log(max(abs(offset), 2) / 2) / math.log(20 / 2))
    return (abs(offset) if abs(offset) < 2 else min(far, 3)) + (4 if offset > 0 else 0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padding", [0, 9])
def test_biases_are_those_of_all_pairs(causal, padding, monkeypatch):
    length, near = 45, {"rtol": 0, "atol": 1e-11}
    monkeypatch.setattr(softmax, "_BIASES", 2 * length * 8)
    torch.manual_seed(0)
    relative, mechanism = RelativeBias(CONFIG).double(), softmax.Softmax()
    q, k, v = (torch.randn(3, 2, length, 4).double().requires_grad_() for _ in range(3))
    mask_BL = torch.arange(length) < torch.tensor([[length - padding], [length], [length]])
    context = Context(torch.zeros(3, length, 8), mask_BL, causal, logit_bias=relative)
    buckets = [[bucket(key - query) for key in range(length)] for query in range(length)]
    logits = q @ k.mT / 2 + relative.table[torch.tensor(buckets)].permute(2, 0, 1)
    seen = mask_BL[:, None, None] & torch.ones(length, length).tril(0 if causal else length).bool()
    weights = logits.masked_fill(~seen, -math.inf).softmax(-1) * mask_BL[:, None, :, None]
    out, pick = mechanism(q, k, v, context), torch.randn_like(v)
    torch.testing.assert_close(out, weights @ v, **near)
    torch.testing.assert_close(mechanism.attention_map(q, k, context), weights, **near)
    given = (q, k, v, relative.table)
    found, expected = (torch.autograd.grad((x * pick).sum(), given) for x in (out, weights @ v))
    torch.testing.assert_close(found, expected, **near)
    state = mechanism.initial_state(k[:, :, 0], v[:, :, 0])
    for n in range(length if causal else 0):
        q_n, k_n, v_n = (x.detach()[1:, :, n] for x in (q, k, v))
        state = state if n else mechanism.initial_state(k_n, v_n)
        state, one = mechanism.step(state, q_n, k_n, v_n, context)
        torch.testing.assert_close(one, out[1:, :, n], **near)


def test_biases_of_all_pairs_are_not_in_memory_at_once(monkeypatch):
    length = 512
    monkeypatch.setattr(softmax, "_BIASES", 2 * length * 16)
    q, mask_BL = torch.randn(1, 2, length, 4), torch.ones(1, length, dtype=torch.bool)
    with TensorMemory() as memory, torch.no_grad():
        context = Context(q[:, 0], mask_BL, causal=False, logit_bias=RelativeBias(CONFIG))
        softmax.Softmax()(q, q, q, context)
    assert memory.peak < 4 * 2 * length**2 / 4


def test_the_estimate_of_memory_grows_with_the_length():
    """From lengths at which all pairs would be one block."""
    config = replace(CONFIG, num_heads=12, model_dim=24, max_length=8192)
    described = ModelDescription("", Objective.masked, config, "softmax", {}, 0, 8192)
    network = build_network(config, described.attention_config, seed=0)
    model = PretrainedModel(network, described, rebuild=lambda _: network)
    assert Room(model).needs(8192) < 6 * Room(model).needs(2048)


def test_settings_that_are_not_used_are_not_compared():
    rotary = ModelConfig(1, 2, 8, 8, 64)
    same = replace(rotary, head_dim=4, relative_buckets=64, global_base=3.0)
    assert differences(rotary, same) == []
    assert len(differences(rotary, replace(rotary, head_dim=8, norm_epsilon=0.1))) == 2


def test_the_mean_of_many_residues_in_half_precision():
    states_BLD, lengths_B = torch.full((1, 1002, 4), 100.0).half(), torch.tensor([1000])
    assert residue_means(states_BLD, lengths_B, 1).tolist() == [[100.0] * 4]
