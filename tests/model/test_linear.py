"""Linear layers by either library: which one is chosen, and that both are correct."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from protlm.attention.ops import products
from protlm.config import Activation, HeadKind, ModelConfig
from protlm.data.vocabulary import VOCABULARY
from protlm.model.layers import Linear
from protlm.model.transformer import build_network
from tests.rounding import error_bound

SIZES = ModelConfig(num_layers=2, num_heads=2, model_dim=16, feedforward_dim=32)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what oneDNN multiplies, as on an AMD processor."""
    found: list[tuple[int, ...]] = []
    library = products._linear if products._has_onednn() else F.linear

    def count(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        found.append(tuple(x.shape))
        return library(x, w, bias)

    monkeypatch.setattr(products, "_is_amd", lambda: True)
    monkeypatch.setattr(products, "_has_onednn", lambda: True)
    monkeypatch.setattr(products, "_linear", count)
    return found


def drawn(length: int) -> Tensor:
    return torch.randn(3, length, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("has_bias", [True, False])
def test_both_libraries_give_the_product(has_bias: bool, calls: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    layer, x = Linear(16, 9, bias=has_bias), drawn(7)
    by_torch = layer(x)
    assert by_torch.requires_grad and calls == []
    with torch.no_grad():
        by_onednn = layer(x)
    assert calls == [(3, 7, 16)]
    exact, sizes = (
        x.double() @ layer.weight.double().mT,
        x.double().abs() @ layer.weight.double().abs().mT,
    )
    if has_bias:
        exact, sizes = exact + layer.bias.double(), sizes + layer.bias.double().abs()
    for found in (by_torch, by_onednn):
        # A sum of 16 products and a bias.
        assert ((found - exact).abs() <= error_bound(torch.float32, sizes, 17)).all()


def test_other_products_stay_with_torch(calls: list[tuple[int, ...]]) -> None:
    layer = Linear(16, 9)
    with torch.no_grad():
        layer(drawn(1))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(drawn(7)).dtype == torch.bfloat16
        layer.double()(drawn(7).double())
    assert calls == []


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning"
)
def test_without_numbers_or_in_a_trace_torch_multiplies(calls: list[tuple[int, ...]]) -> None:
    layer = Linear(16, 9)
    traced = torch.jit.trace(layer, drawn(7), check_trace=False)
    assert torch.equal(traced(drawn(7)), F.linear(drawn(7), layer.weight, layer.bias))
    with torch.no_grad():
        traced = torch.jit.trace(layer, drawn(7), check_trace=False)
        assert torch.equal(traced(drawn(7)), F.linear(drawn(7), layer.weight, layer.bias))
        assert layer.to("meta")(drawn(7).to("meta")).shape == (3, 7, 9)
    assert calls == []


@pytest.mark.parametrize("head", HeadKind)
@pytest.mark.parametrize("activation", Activation)
def test_all_layers_of_a_network_take_it(
    head: HeadKind, activation: Activation, calls: list[tuple[int, ...]]
) -> None:
    config = replace(SIZES, head=head, activation=activation, output_gate=True)
    network = build_network(config, {"name": "softmax"}, seed=0).eval()
    tokens_BL = torch.full((3, 7), VOCABULARY.mask)
    with torch.no_grad():
        network(tokens_BL, torch.ones_like(tokens_BL, dtype=torch.bool), causal=False)
    # Queries, keys and values are one product; then the gate, the output, and the sublayer's two
    # or three matrices.
    in_block = 3 + (3 if activation is Activation.swiglu else 2)
    assert len(calls) == 2 * in_block + (2 if head is HeadKind.dense_norm else 1)
