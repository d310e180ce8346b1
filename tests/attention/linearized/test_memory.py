"""What a Performer keeps and allocates: never L×L, never L×R×K, and no features between passes."""

from typing import Any

import torch
from torch import Tensor

HEADS, DIM = 2, 16


def inputs(length: int) -> tuple[list[Tensor], dict[str, Any]]:
    """Differentiable queries, keys and values, and the rest."""
    heads = [torch.randn(1, HEADS, length, DIM, requires_grad=True) for _ in range(3)]
    mask_BL = torch.ones(1, length, dtype=torch.bool)
    mask_BL[:, -5:] = False
    return heads, {"hidden_BLD": torch.zeros(1, length, 1), "mask_BL": mask_BL}


def test_no_features_are_kept_for_the_backward_pass(performer: Any, causal: bool) -> None:
    length = 1024
    mechanism = performer.create(head_dim=DIM)
    heads, rest = inputs(length)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        mechanism(*heads, **rest, causal=causal)
    num_features = DIM if mechanism.projection is None else len(mechanism.projection)
    # q, k, v, the output and the denominator per position, and a few states of R × (K + 1).
    states = 2 * HEADS * num_features * (DIM + 2) + num_features * DIM + length
    assert sum(kept.values()) <= HEADS * length * (4 * DIM + 1) + states


def test_no_tensor_is_of_the_square_of_the_length(
    performer: Any, causal: bool, largest_tensor: Any
) -> None:
    length = 4096
    mechanism = performer.create(head_dim=DIM)
    heads, rest = inputs(length)
    with largest_tensor:
        mechanism(*heads, **rest, causal=causal).square().sum().backward()
    # A tile has 2¹⁸ features for each thread.
    tile = (1 << 18) * torch.get_num_threads()
    assert largest_tensor.numel <= max(HEADS * length * (DIM + 1), tile)
    assert largest_tensor.numel < length * length
