"""A network on packed proteins: each is as it is alone, and a compiled one has one graph."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from protlm.bounds import Bounds
from protlm.data.vocabulary import VOCABULARY
from protlm.model.transformer import ProteinLM
from protlm.system.errors import UserError
from protlm.training.callbacks.hooks import compile_model
from protlm.training.flops import ModelFlops
from tests.small_models import network_of

# What torch's compiler does to the tensors and functions that it traces.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
SHAPE, LONGEST = (2, 150), 60
# What reaches over positions, or counts them.
EXTRAS = {"convolution": 5, "token_dropout": True, "unet_skips": True, "value_embedding": True}
ALIGNED = "hybrid attention.window=8 attention.relatives_window=5"
NETWORKS = [("attention=hybrid", {"positions": "rotary", "global_every": 2})]
NETWORKS += [("attention=softmax", {"positions": name}) for name in ("learned", "relative")]


def packed(seed: int) -> tuple[Tensor, Tensor, Bounds]:
    """Two rows of proteins of random lengths, each a family, a tenth of them masked."""
    rng, spans = np.random.default_rng(seed), []
    tokens_BL = torch.full(SHAPE, VOCABULARY.pad)
    for row, length in enumerate([SHAPE[1]] * SHAPE[0]):
        end = 0
        # A row is left with some padding.
        while (start := end) + 20 < length:
            own = torch.from_numpy(rng.integers(4, 24, rng.integers(3, LONGEST + 1)))
            own[torch.from_numpy(rng.random(len(own)) < 0.1)] = VOCABULARY.mask
            end = min(start + len(own), length)
            tokens_BL[row, start:end] = own[: end - start]
            spans.append((row * length + start, row * length + end))
    first = sum(end <= SHAPE[1] for _, end in spans)
    families = [first, len(spans) - first]
    bounds = Bounds.of(spans, SHAPE, longest=LONGEST, families=families)
    return tokens_BL, tokens_BL != VOCABULARY.pad, bounds


def trained(*settings: str, **model: object) -> ProteinLM:
    """Parameters are far from 0, where convolutions and value embeddings start."""
    network = network_of(*settings, **model)
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return network


def gradients(network: ProteinLM, logits: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(logits.logsumexp(-1).sum(), [*network.parameters()])
    return [logits.detach(), *found]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("settings", "positions"), NETWORKS)
def test_a_packed_protein_is_as_it_is_alone(settings, positions, causal):
    network = trained(settings, **EXTRAS, **positions, num_layers=2).double()
    tokens_BL, mask_BL, bounds = packed(0)
    out = network(tokens_BL, mask_BL, causal=causal, layers=[0, 1], bounds=bounds)
    flat, parts = tokens_BL.flatten(), []
    for start, end in bounds.spans.tolist():
        alone = flat[None, start:end], torch.ones(1, end - start, dtype=torch.bool)
        parts.append(network(*alone, causal=causal, layers=[0, 1]))
    assert out.hidden.keys() == {0, 1} and out.hidden[1].shape[:2] == SHAPE
    for layer, hidden_BLD in out.hidden.items():
        expected = torch.cat([one.hidden[layer][0] for one in parts])
        torch.testing.assert_close(hidden_BLD[mask_BL], expected, rtol=1e-11, atol=1e-11)
    # Whole rows do not say that their proteins need no padding.
    whole = network(tokens_BL, mask_BL, causal=causal, bounds=bounds, is_whole=True)
    assert torch.equal(whole.logits_BLV[mask_BL], out.logits_BLV[mask_BL])
    expected = torch.cat([one.logits_BLV[0] for one in parts])
    results = [gradients(network, logits) for logits in (out.logits_BLV[mask_BL], expected)]
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "relatives", "is_one"),
    [
        ("hybrid", {}, True),
        ("softmax", {}, False),
        ("performer_relu", {"relatives": "full", "relatives_numbers": 64}, True),
        ("performer_relu", {"relatives": "ordered"}, False),
        ("softmax", {"relatives": "ordered"}, False),
        (ALIGNED, {"relatives": "full", "relatives_sum": "apart"}, False),
    ],
)
def test_all_batches_of_packed_proteins_are_one_graph(settings, relatives, is_one):
    """What leaves it adds none for other numbers of proteins and families."""
    # A graph has all layers; what leaves it is the same in each, and takes long to compile.
    sizes = {"convolution": 5, "num_layers": 2 if is_one else 1}
    typed = f"attention={settings}".split()
    plain, compiled = (trained(*typed, **sizes, **relatives) for _ in range(2))
    counter, graphs = CompileCounterWithBackend("aot_eager"), set[int]()
    torch._dynamo.reset()
    compile_model(compiled, backend=counter)
    for seed in range(3):
        tokens_BL, mask_BL, bounds = packed(seed)
        results = []
        for network in (plain, compiled):
            out = network(tokens_BL, mask_BL, causal=False, bounds=bounds)
            results.append(gradients(network, out.logits_BLV[mask_BL]))
        for one, other in zip(*results, strict=True):
            assert (one - other).norm() <= 1e-4 * one.norm()
        graphs.add(counter.frame_count)
    assert len(graphs) == 1 and (graphs == {1}) == is_one
    torch._dynamo.reset()


def test_flops_are_those_of_the_proteins():
    """Of their pairs too, unlike those of a row of as many tokens."""
    network, device = network_of("attention=softmax"), torch.device("cpu")
    whole = ModelFlops(network, causal=False).training(SHAPE[1], device)
    own = ModelFlops(network, causal=False).training(SHAPE[1], device, packed(0)[-1])
    assert 0.5 * whole < own < whole


def test_proteins_that_are_longer_than_a_table_are_refused():
    tokens_BL, mask_BL, bounds = packed(0)
    network = network_of(positions="learned", max_length=LONGEST - 1)
    with pytest.raises(UserError, match="60 positions exceed the 59"):
        network(tokens_BL, mask_BL, causal=False, bounds=bounds)
