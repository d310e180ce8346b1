"""Another attention mechanism for a trained model, whose other weights are kept."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from protlm.attention import mechanism
from protlm.attention.layers import mechanisms_of, option_differences, stored_options, unable
from protlm.checkpoints.description import ModelDescription
from protlm.checkpoints.format import Checkpoint
from protlm.config import Objective
from protlm.loading import misfit, model_of, network_of
from protlm.model.selfattention import MECHANISM, BoundedNorm, FreeNorm, NormsByKind
from protlm.model.transformer import ProteinLM
from protlm.system.errors import UserError

_BLOCK = re.compile(r"^blocks\.\d+\.")


@dataclass(frozen=True)
class Conversion:
    """A converted model, with the names of new weights, and of those of the original not used."""

    checkpoint: Checkpoint
    initialized: tuple[str, ...]
    left_out: tuple[str, ...]


def convert(found: Checkpoint, attention: Mapping[str, Any], *, seed: int | None) -> Conversion:
    """Replaces the attention mechanism of a model, and keeps all weights outside of it.

    A layer whose mechanism stays keeps its weights where they fit. Other weights, and random
    projections, are a function of the seed, which is that of the model if None is given.
    """
    described, hash_ = found.description, model_of(found).hash
    options = dict(attention)
    name = str(options.pop("name"))
    description = replace(
        described,
        attention=name,
        attention_options=stored_options(name, options),
        seed=described.seed if seed is None else seed,
        source={
            **(described.source or {}),
            "converted_from": described.attention,
            "converted_hash": hash_,
        },
    )
    _check(found, description)
    network = network_of(description, description.seed)
    old = _with_norms_of(network, found)
    new = network.state_dict()
    num_layers, both = described.model.num_layers, (description, described)
    kinds = zip(*(mechanisms_of(one.attention_config, num_layers) for one in both), strict=True)
    same = tuple(f"blocks.{n}." for n, (now, was) in enumerate(kinds) if now.name == was.name)
    learned = {n for n, _ in network.named_parameters(remove_duplicate=False)}
    fits = {n for n in learned & old.keys() if n.startswith(same) and old[n].shape == new[n].shape}
    kept = {n: v for n, v in old.items() if n in fits or (n in new and MECHANISM not in n)}
    try:
        network.load_state_dict(kept, strict=False)
    except RuntimeError as error:
        raise UserError(f"attention={name}: {misfit(error)}; choose another --attention") from None
    # Layers may share parameters, and the file format has no shared tensors.
    weights = {key: value.clone() for key, value in network.state_dict().items()}
    return Conversion(
        Checkpoint(found.path, description, weights),
        initialized=_patterns(n for n, v in new.items() if n not in kept and v.is_floating_point()),
        left_out=_patterns(n for n in old if n not in kept and (n in learned or n not in new)),
    )


def _with_norms_of(network: ProteinLM, found: Checkpoint) -> dict[str, Tensor]:
    """Returns the weights, with query-key norms as the network has them, by kind of head or free.

    A bounded norm s is a free one with the gain s K^(-1/4).
    """
    weights, model = dict(found.weights), found.description.model
    factor = model.width_of_head**-0.25
    for name, norm in network.named_modules():
        if isinstance(norm, FreeNorm) and f"{name}.scale" in weights:
            weights[f"{name}.gain"] = BoundedNorm.norms(weights.pop(f"{name}.scale")) * factor
        if isinstance(norm, NormsByKind):
            exact, num_exact = f"{name}.exact.gain", len(norm.exact.gain)
            if (gain_H := weights.pop(f"{name}.gain", None)) is not None:
                weights[exact] = gain_H[:num_exact]
            if (scale_H := weights.pop(f"{name}.scale", None)) is not None:
                weights[exact] = BoundedNorm.norms(scale_H[:num_exact]) * factor
                weights[f"{name}.linear.scale"] = scale_H[num_exact:]
    return weights


def _check(found: Checkpoint, asked: ModelDescription) -> None:
    described, name, num_layers = found.description, asked.attention, asked.model.num_layers
    if name == described.attention and not option_differences(
        name, described.attention_options, asked.attention_options
    ):
        raise UserError(
            f"{found.path} already has attention={name} with these options; choose another "
            "mechanism with --attention, or other options with --set OPTION=VALUE"
        )
    layers = (mechanisms_of(one.attention_config, num_layers) for one in (asked, described))
    for pair in zip(*layers, strict=True):
        sharing = [one.name for one in pair if mechanism(one.name).shares_query_key]
        if len(sharing) == 1:
            raise UserError(
                f"{found.path} cannot be converted from attention={described.attention} to {name}: "
                f"the keys of {sharing[0]} are its queries, and the other has a projection for "
                "keys; choose another --attention"
            )
    is_causal = described.objective is Objective.causal
    if cannot := unable(
        asked.attention_config,
        num_layers,
        lambda kind: kind.supports_causal if is_causal else kind.supports_bidirectional,
    ):
        raise UserError(
            f"{cannot} does not support objective={described.objective}, on which "
            f"{found.path} was trained; choose another --attention (docs/mechanisms.md)"
        )


def _patterns(names: Iterable[str]) -> tuple[str, ...]:
    """Returns names with `*` for the number of the block, each once."""
    return tuple(dict.fromkeys(_BLOCK.sub("blocks.*.", name) for name in names))
