"""Two calls of fused attention are FAVOR+."""

import torch

from benchmarks.two_flash import two_flash_attention
from protlm.attention.performer_softmax import PerformerSoftmax


def test_two_flash_calls_are_the_performer() -> None:
    mechanism = PerformerSoftmax(head_dim=8, num_features=20).double()
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(3, 2, 2, 70, 8, dtype=torch.float64, generator=generator)
    mask_BL = torch.ones(2, 70, dtype=torch.bool)
    results = []
    for is_ours in (True, False):
        leaves = [x.clone().requires_grad_() for x in vectors]
        if is_ours:
            out = mechanism(*leaves, hidden_BLD=vectors[0, :, 0], mask_BL=mask_BL, causal=False)
        else:
            out = two_flash_attention(*leaves, mechanism.get_buffer("projection").double())
        results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
