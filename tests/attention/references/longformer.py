"""Longformer: windows, and rows of global tokens by their own projections (arXiv 2004.05150, 3)."""

import torch
from torch import Tensor

from tests.attention.truth import Given, outputs, softmax


@outputs(
    {"window": 16, "num_global": 0},
    # Residues in the window of the first tokens and far from it, one beyond many samples.
    {
        "window": 10,
        "dilation": 3,
        "dilated_heads": 1,
        "num_global": 2,
        "global_positions": [40, 3, 71],
    },
    further=[{"window": 16, "num_global": 3}, {"window": 150, "num_global": 2}],
    # Rows of global tokens have their own values, from the hidden input.
    linear=lambda options: options["num_global"] == 0 and not options["global_positions"],
)
def longformer(given: Given) -> Tensor:
    options = given.options
    number_BL = (given.mask_BL.cumsum(1) - 1).masked_fill(~given.mask_BL, -1)
    chosen = [*range(options["num_global"]), *options["global_positions"]]
    is_global_BL = torch.isin(number_BL, torch.tensor(chosen, dtype=torch.int64))
    back, ahead = (options["window"], 0) if given.causal else (options["window"] // 2,) * 2
    steps = [options["dilation"]] * options["dilated_heads"] + [1] * given.q_BHLK.shape[1]
    distance_LL = given.distances()
    in_window_HLL = torch.stack(
        [
            (distance_LL % d == 0) & (distance_LL <= back * d) & (distance_LL >= -ahead * d)
            for d in steps[: given.q_BHLK.shape[1]]
        ]
    )
    among = is_global_BL[:, None, :, None] | is_global_BL[:, None, None] | in_window_HLL
    visible = given.visible() & among
    out_BHLC = softmax(given.logits(), visible) @ given.v_BHLC
    if not chosen:
        return out_BHLC
    own = [
        x + (given.hidden_BLD @ given.tensors[name]).unflatten(-1, (x.shape[1], -1)).transpose(1, 2)
        for name, x in zip(("query_global", "key_global", "value_global"), given[:3], strict=True)
    ]
    own_BHLC = softmax(own[0] @ own[1].mT / given.head_dim**0.5, visible) @ own[2]
    return torch.where(is_global_BL[:, None, :, None], own_BHLC, out_BHLC)
