"""No mechanism makes the host wait for a GPU, in the forward or in the backward pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.pretended_cuda import DEVICE, PretendedCuda
from protlm.attention.linearized import selection
from protlm.config import TrainConfig
from protlm.config.composition import compose
from protlm.model.objective import target_sums
from protlm.model.transformer import build_network


def trace(mechanism: torch.nn.Module, inputs: Any, *, causal: bool) -> None:
    inputs = type(inputs)(*(x.to("meta") for x in inputs)).differentiable()
    with PretendedCuda():
        out = inputs.run(mechanism.to("meta"), causal=causal)
        torch.autograd.backward([out], [torch.empty_like(out)])
    assert out.is_meta
    assert all(x.grad is None or x.grad.is_meta for x in inputs[:4])


def test_neither_pass_waits_for_a_gpu(
    case: Any, causal: bool, make_inputs: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The check of fused kernels waits, once per size.
    monkeypatch.setattr(selection, "is_usable", lambda *_: False)
    trace(case.create(), make_inputs(257).to(torch.bfloat16), causal=causal)


def test_a_synchronization_is_found() -> None:
    x = torch.ones(3, device="meta", requires_grad=True)

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            assert gradients[0].device == DEVICE
            return gradients[0] * torch.tensor([1.0, 2, 3], device=gradients[0].device)

    with PretendedCuda():
        for wait in (lambda: bool(x.any()), lambda: x[x > 0], x.nonzero):
            with pytest.raises((RuntimeError, NotImplementedError)):
                wait()
        with pytest.raises(RuntimeError, match="device"):
            x + torch.ones(3)
        there = torch.ones(3)
        for copy in (
            lambda: there.to(DEVICE),
            lambda: there.to(x),
            lambda: x.detach().copy_(there),
            lambda: x[[0, 1]],
            lambda: x[there.long()],
        ):
            with pytest.raises(AssertionError, match="copies values"):
                copy()
        with pytest.raises(AssertionError, match="copies values"):
            torch.autograd.backward([Waits.apply(x)], [torch.empty_like(x)])


@pytest.mark.parametrize("compute", ["masked", "causal"])
@pytest.mark.parametrize("model", ["paper_36", "modern_36"])
def test_a_model_and_its_loss_do_not_wait(model: str, compute: str) -> None:
    given = [f"model={model}", "attention.backend=torch", "model.num_layers=2"]
    config = compose(TrainConfig, ["data.dir=unused", "run_dir=unused", *given])
    network = build_network(config.model, config.attention, seed=0).to("meta").train()
    tokens_BL = torch.zeros(2, 200, dtype=torch.int64, device="meta")
    with PretendedCuda():
        out = network(tokens_BL, tokens_BL == 0, causal=compute == "causal")
        loss = target_sums(out.logits_BLV, tokens_BL).nats
        torch.autograd.backward([loss])
    assert all(p.grad is not None for p in network.parameters())
