"""The output layer: dense, GELU and norm before it, and weights tied to the embedding."""

import math

import pytest
import torch

from protlm.config import HeadKind
from protlm.data.vocabulary import VOCABULARY
from tests.model.test_transformer import example, network, preset


def test_the_logits_are_those_of_the_formula() -> None:
    model = network(preset("tiny", head=HeadKind.dense_norm, tied_head=True, norm="layer")).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    with torch.no_grad():
        out = model(*example(), causal=False, layers=[2])
        weights = model.state_dict()
        x = out.hidden[2] @ weights["head_transform.dense.weight"].T
        x = x + weights["head_transform.dense.bias"]
        x = x / 2 * (1 + torch.erf(x / math.sqrt(2)))
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
        x = x * weights["head_transform.norm.weight"] + weights["head_transform.norm.bias"]
        expected = x @ weights["embedding.weight"].T + weights["head.bias"]
    torch.testing.assert_close(out.logits_BLV, expected, rtol=1e-10, atol=1e-10)


def test_a_tied_head_trains_the_embedding() -> None:
    model = network(preset("tiny", tied_head=True))
    assert "head.weight" not in model.state_dict()
    # The logits of a new model have a variance of about 1.
    logits_BLV = model(*example(), causal=False).logits_BLV
    assert 0.5 < logits_BLV.std() < 2
    # U is not among the inputs.
    logits_BLV[..., VOCABULARY["U"]].sum().backward()
    gradient = model.embedding.weight.grad
    assert gradient is not None
    assert gradient[VOCABULARY["U"]].abs().max() > 0


@pytest.mark.parametrize("norm, default", [("layer", 1e-5), ("rms", 1e-6)])
def test_the_epsilon_of_all_norms_can_be_set(norm: str, default: float) -> None:
    for epsilon in (None, 1e-12):
        model = network(preset("tiny", norm=norm, norm_epsilon=epsilon, embedding_norm=True))
        found = {module.eps for module in model.modules() if hasattr(module, "eps")}
        assert found == {epsilon or default}
