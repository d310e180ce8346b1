"""Tiles change no result, memory grows with the length alone, and no pass waits for a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from protlm.attention import attention_free, long_short, reformer
from protlm.attention.base import Context
from protlm.attention.linearized import selection, tiles
from protlm.attention.ops import block_sparse
from protlm.config import TrainConfig
from protlm.config.composition import compose
from protlm.model.objective import target_sums
from protlm.model.transformer import build_network
from tests.attention.cases import Inputs, LargestTensor, make_inputs
from tests.fixtures.pretended_cuda import PretendedCuda
from tests.marks import slow_but

# The numbers that are computed together on a CPU, by module.
TILES = [(module, "_CPU_NUMBERS") for module in (attention_free, long_short, reformer)]
TILES += [(block_sparse, "_CPU_ELEMENTS")]
# Numbers that are kept for the backward pass, by those of q, k, v and the output: most keep these
# and a few states; copies of keys in blocks, weights of windows and float32 add to it.
KEPT = {"aft_conv": 4.0, "aft_local": 9.0, "hybrid": 6.0, "long_short": 9.0}
KEPT |= {"longformer": 5.5, "window": 5.5, "rfa": 3.2}


def set_tiles(monkeypatch: pytest.MonkeyPatch, numbers: int) -> None:
    for module, name in TILES:
        monkeypatch.setattr(module, name, numbers)


@contextmanager
def kept() -> Iterator[dict[int, int]]:
    """Records the sizes of the storages that are kept for a backward pass."""
    sizes: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // 4
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield sizes


@pytest.mark.slow
def test_memory_grows_with_the_length_only(case, causal, monkeypatch):
    set_tiles(monkeypatch, 1 << 13)
    largest, stored = [], []
    for length in (1024, 2048):
        mechanism = case.create(max_length=length)
        leaves = [torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3)]
        hidden_BLD = torch.randn(1, length, 16, requires_grad=True)
        context = Context(hidden_BLD, torch.arange(length)[None] < length - 7, causal)
        with LargestTensor() as tensors, kept() as sizes:
            out = mechanism(*leaves, context)
        with tensors:
            out.square().sum().backward()
        largest.append(tensors.numel)
        tables = {x.untyped_storage().data_ptr() for x in mechanism.parameters()}
        stored.append(sum(size for pointer, size in sizes.items() if pointer not in tables))
    assert largest[1] <= 2.2 * largest[0]
    assert largest[1] < 2048**2 / 4
    assert stored[1] <= 2.2 * stored[0]
    assert stored[1] <= KEPT.get(case.name, 3.0) * 4 * leaves[0].numel()


def test_tiles_make_no_difference(case, causal, monkeypatch):
    mechanism = case.create().double()
    results = []
    for numbers in (1, 10_000, 1 << 20):
        set_tiles(monkeypatch, numbers)
        monkeypatch.setattr(tiles, "_CPU_NUMBERS", numbers)
        inputs = make_inputs(130).differentiable()
        out = inputs.run(mechanism, causal=causal)
        leaves = [*inputs[:4], *mechanism.parameters()]
        found = torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True)
        results.append([out, *found])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_neither_pass_waits_for_a_gpu(case, causal, monkeypatch):
    # The check of fused kernels waits, once per size.
    monkeypatch.setattr(selection, "is_usable", lambda *_: False)
    inputs = make_inputs(257).to(torch.bfloat16)
    inputs = Inputs(*(x.to("meta") for x in inputs)).differentiable()
    with PretendedCuda():
        out = inputs.run(case.create().to("meta"), causal=causal)
        torch.autograd.backward([out], [torch.empty_like(out)])
    assert out.is_meta
    assert all(x.grad is None or x.grad.is_meta for x in inputs[:4])


@pytest.mark.parametrize("compute", ["masked", "causal"])
@pytest.mark.parametrize("model", slow_but(["paper_36", "modern_36"], "modern_36"))
def test_a_model_and_its_loss_do_not_wait(model, compute):
    given = [f"model={model}", "attention.backend=torch", "model.num_layers=2"]
    config = compose(TrainConfig, ["data.dir=unused", "run_dir=unused", *given])
    network = build_network(config.model, config.attention, seed=0).to("meta").train()
    tokens_BL = torch.zeros(2, 200, dtype=torch.int64, device="meta")
    with PretendedCuda():
        out = network(tokens_BL, tokens_BL == 0, causal=compute == "causal")
        loss = target_sums(out.logits_BLV, tokens_BL).nats
        torch.autograd.backward([loss])
    assert all(p.grad is not None for p in network.parameters())
