"""A compiled model: few graphs, the same results, the same names."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from protlm.attention import mechanism, names
from protlm.data.batching.mixture import SampleOrder
from protlm.data.batching.plan import BatchStream, RankBatches
from protlm.data.batching.strategies import LengthBuckets
from protlm.training import run
from protlm.training.callbacks.hooks import RunEagerly, compile_model
from tests.fixtures.runs import rows_of, saved, weights_of
from tests.small_models import network_of

# What torch's compiler does to the tensors and functions that it traces.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    """Clears the graphs of the process, and restores the limit of their number."""
    config = torch._dynamo.config
    names = ("recompile_limit", "accumulated_recompile_limit")
    torch._dynamo.reset()
    with config.patch({name: getattr(config, name) for name in names}):
        yield
    torch._dynamo.reset()


def gradients(
    made: torch.nn.Module, rows: int, length: int, *, causal: bool = False, is_whole: bool = False
) -> list[torch.Tensor]:
    tokens_BL = torch.arange(rows * length).reshape(rows, length) % 20 + 4
    mask_BL = torch.ones(rows, length, dtype=torch.bool)
    mask_BL[0, length // 2 :] = is_whole
    made.zero_grad()
    out = made(tokens_BL, mask_BL, causal=causal, is_whole=is_whole)
    out.logits_BLV[mask_BL].logsumexp(-1).sum().backward()
    return [p.grad for p in made.parameters() if p.grad is not None]


# Settings, whether the model is causal, and the error of gradients.
COMPILED = [
    ("attention=performer_relu model.convolution=3", False, 1e-4),
    ("attention=performer_softmax model.qk_norm=true", False, 1e-4),
    ("attention=softmax trainer.activation_checkpointing=true", False, 1e-4),
]
COMPILED += [
    (f"attention={name} model.convolution=3", mode == "causal", 1e-3)
    for name in names()
    for mode in ("bidirectional", "causal")
    if getattr(mechanism(name), f"supports_{mode}")
]


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "causal", "error"), COMPILED)
def test_a_length_is_one_graph_of_a_model_of_any_mechanism_and_learns_the_same(
    settings, causal, error
):
    """With rotary positions where the mechanism takes them."""
    plain, compiled = (network_of(*settings.split(), num_layers=1) for _ in range(2))
    counter = CompileCounterWithBackend("aot_eager")
    compile_model(compiled, backend=counter)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    # The third batch has the length of the first.
    for number, length in enumerate((16, 24, 16) if error == 1e-4 else (24,), start=1):
        both = (gradients(made, 2, length, causal=causal) for made in (plain, compiled))
        torch.testing.assert_close(*both, rtol=error, atol=1e-5)
        assert counter.frame_count == min(number, 2)


@pytest.mark.slow
def test_softmax_hides_no_padding_where_the_host_knows_of_none():
    """The hidden coordinate would make the heads wider, and kernels of cards slower."""
    widths: list[list[int]] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nodes = [n for n in graph.graph.nodes if "scaled_dot_product" in str(n.target)]
        widths.append([n.args[0].meta["example_value"].shape[-1] for n in nodes])
        return graph.forward

    plain, compiled = (network_of("attention=softmax") for _ in range(2))
    compile_model(compiled, backend=keep)
    for is_whole in (False, True, False):
        both = (gradients(made, 2, 16, is_whole=is_whole) for made in (plain, compiled))
        torch.testing.assert_close(*both, rtol=1e-4, atol=1e-5)
    padded, whole = widths
    assert set(padded) == {whole[0] + 8} and len(padded) == len(whole) == plain.num_layers


@pytest.mark.slow
def test_more_lengths_than_torch_s_default_limit_are_compiled():
    made = network_of("attention=aft_simple", num_layers=1)
    counter = CompileCounterWithBackend("eager")
    compile_model(made, backend=counter)
    with torch.no_grad():
        for length in range(8, 8 + 10):
            made(torch.full((1, length), 5), torch.ones(1, length, dtype=torch.bool), causal=False)
    assert counter.frame_count == 10


def test_slices_of_one_length_have_one_shape():
    lengths = np.random.default_rng(0).lognormal(5.5, 0.5, 3_000).astype(np.int64)
    rule = LengthBuckets(8_192, 1_024, block=100)

    def shapes(share: RankBatches) -> set[tuple[int, int]]:
        stream = BatchStream(lengths.take, SampleOrder([len(lengths)]), rule, share=share)
        return {(len(plan.rows), plan.length) for plan in stream}

    filled = shapes(RankBatches(1, 2, micro_batches=3, fill=True))
    num_lengths = len({length for _, length in filled})
    assert len(filled) == num_lengths > 20 and np.prod(list(filled), axis=1).max() < 8_192
    assert len(shapes(RankBatches(1, 2, micro_batches=3))) > num_lengths


@pytest.mark.slow
def test_a_compiled_run_learns_the_same(train, monkeypatch):
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(
        run, "compile_model", lambda network: compile_model(network, backend=counter)
    )
    settings = (
        "attention=performer_softmax",
        "attention.num_features=32",
        "model.qk_norm=true",
        "model.num_layers=1",
        # One length for all batches.
        "data.mode=concatenated",
        "trainer.log_every=2",
        "trainer.valid_every=2",
    )
    plain = train("plain", *settings)
    compiled = train("compiled", *settings, "trainer.compile=true")
    # Neither the validation nor the steps with hooks made another graph.
    assert counter.frame_count == 1
    torch.testing.assert_close(weights_of(plain), weights_of(compiled), rtol=0, atol=1e-5)
    assert [row["step"] for row in rows_of(compiled, "square_norm_layer_1")] == [2, 4]
    assert RunEagerly.__name__ not in saved(plain)["callbacks"]
