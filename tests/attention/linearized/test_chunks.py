"""Running sums of states: in a buffer for tiles of one sequence, cumulative for the others."""

import pytest
import torch

from protlm.attention.linearized.tiles import States


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("leading", [(1, 1), (2, 3)])
def test_every_chunk_begins_with_the_sum_of_those_before(
    leading: tuple[int, int], reverse: bool
) -> None:
    x = torch.randn(*leading, 12, 4, 8).double()
    y = torch.randn(*leading, 12, 8, 6).double()
    states = States(reverse=reverse)
    assert states.last is None
    # The second tile is longer than the first, the third as long, and the last one shorter.
    tiles = [slice(0, 2), slice(2, 6), slice(6, 10), slice(10, 12)]
    for tile in reversed(tiles) if reverse else tiles:
        found = states.add_products(x[:, :, tile], y[:, :, tile])
        for place, chunk in enumerate(range(tile.start, tile.stop)):
            others = slice(chunk + 1, None) if reverse else slice(0, chunk)
            expected = (x[:, :, others] @ y[:, :, others]).sum(dim=2)
            torch.testing.assert_close(found[:, :, place], expected)
    torch.testing.assert_close(states.last, (x @ y).sum(dim=2))
