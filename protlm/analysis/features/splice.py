"""What a reconstruction of hidden states costs in predictions, in nats at masked residues."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from protlm.analysis.bootstrap import ratio_interval
from protlm.analysis.features.autoencoder import SparseAutoencoder
from protlm.analysis.masked_residues import masked_scores
from protlm.model.pretrained import PretrainedModel


@contextmanager
def spliced(
    model: PretrainedModel, layer: int, change: Callable[[Tensor], Tensor]
) -> Iterator[PretrainedModel]:
    """Replaces the states of a layer, at residues only, in rows without padding."""
    network, inner = model.network, model.vocabulary.inner
    last = network.final_norm if layer == model.num_layers else network.blocks[layer - 1]

    def changed(_: nn.Module, __: tuple[Any, ...], x_BLD: Tensor) -> Tensor:
        x_BLD = x_BLD.clone()
        x_BLD[:, inner] = change(x_BLD[:, inner]).to(x_BLD.dtype)
        return x_BLD

    hook = (last if layer else network.dropout).register_forward_hook(changed)
    try:
        yield model
    finally:
        hook.remove()


def splice_losses(
    model: PretrainedModel, autoencoder: SparseAutoencoder, sequences: Sequence[str], *, seed: int
) -> dict[str, Any]:
    """Returns the nats a masked residue with the layer intact, reconstructed, and ablated.

    `mean` puts the mean of the training in the place of the state of every residue, and `zero` 0;
    `recovered` is (mean - reconstructed) / (mean - intact). `bypasses` lead past the layer.
    """
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "intact": lambda x_BLD: x_BLD,
        "reconstructed": lambda x_BLD: autoencoder(x_BLD.flatten(0, 1)).view_as(x_BLD),
        "mean": lambda x_BLD: torch.zeros_like(x_BLD) + autoencoder.mean,
        "zero": torch.zeros_like,
    }
    found: dict[str, Any] = {}
    layer, settings = autoencoder.settings.layer, model.description.model
    for name, change in changes.items():
        with spliced(model, layer, change):
            scores = masked_scores(model, sequences, seed=seed)
        found[name] = ratio_interval(scores.nats, scores.targets, seed=seed)
    intact, reconstructed, mean = (found[x]["mean"] for x in ("intact", "reconstructed", "mean"))
    past = {"unet_skips": range(1, model.num_layers), "value_embedding": range(model.num_layers)}
    bypasses = [x for x, layers in past.items() if getattr(settings, x) and layer in layers]
    recovered = (mean - reconstructed) / (mean - intact) if mean != intact else None
    return {**found, "recovered": recovered, "bypasses": bypasses}
