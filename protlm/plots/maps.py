"""Attention maps of several layers and heads."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from protlm.system.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def attention_grid(
    maps: dict[int, np.ndarray], *, title: str, heads: Sequence[int] | None = None
) -> "Figure":
    """Draws attention maps in a grid of layers (rows) and heads (columns).

    Each map has its own color scale, from 0 to the 99th percentile of its entries: the maps of
    linear mechanisms differ in contrast by orders of magnitude.

    Args:
        maps: HLL by layer number, as `PretrainedModel.attention_maps` has them: position 0 is
            `<cls>`, residue n is at position n, and the last position is `<eos>`.
        title: what stands above the maps.
        heads: the numbers of the heads, where not all of them from 1 on are given.
    """
    if not maps:
        raise UserError("there is no attention map to draw: name at least one layer")
    num_heads = max(len(map_HLL) for map_HLL in maps.values())
    figure, grid = _new_grid(len(maps), num_heads)
    for row, (layer, map_HLL) in zip(grid, sorted(maps.items()), strict=True):
        numbers = heads or range(1, len(map_HLL) + 1)
        for axes, head, map_LL in zip(row, numbers, map_HLL, strict=False):
            top = float(np.quantile(map_LL, 0.99)) or float(map_LL.max()) or 1.0
            axes.imshow(map_LL, cmap="viridis", vmin=0.0, vmax=top, interpolation="nearest")
            axes.set_title(f"layer {layer} head {head}", fontsize=7, pad=3)
            axes.tick_params(labelsize=6, length=2)
            axes.label_outer()
    scale = "each map from 0 (dark) to its 99th percentile (light)"
    figure.suptitle(f"{title}\n{scale}", fontsize=9)
    figure.supxlabel("position attended to (residue number)", fontsize=8)
    figure.supylabel("position that attends (residue number)", fontsize=8)
    return figure


def _new_grid(num_layers: int, num_heads: int) -> "tuple[Figure, Any]":
    from matplotlib.figure import Figure

    size = (max(1.35 * num_heads + 0.5, 4.5), 1.5 * num_layers + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(num_layers, num_heads, sharex=True, sharey=True, squeeze=False)
    return figure, grid
