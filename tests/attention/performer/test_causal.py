"""Running sums of states: one after the other on a CPU, cumulative elsewhere."""

import pytest
import torch

from protlm.attention.performer.causal import _cumulative_sums, _running_sums


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("begins_with", ["nothing", "a state"])
def test_both_ways_to_sum_are_the_same(begins_with: str, reverse: bool) -> None:
    increments, state = torch.randn(2, 3, 5, 4, 6).double(), torch.randn(2, 3, 4, 6).double()
    given = None if begins_with == "nothing" else state
    before, after = _running_sums(increments, given, reverse=reverse)
    start = torch.zeros_like(state) if given is None else state
    others = _cumulative_sums(increments, start, reverse=reverse)
    torch.testing.assert_close((before, after), others)
    torch.testing.assert_close(after, start + increments.sum(dim=2))
    first, last = (-1, 0) if reverse else (0, -1)
    assert torch.equal(before[:, :, first], start)
    torch.testing.assert_close(before[:, :, last] + increments[:, :, last], after)
