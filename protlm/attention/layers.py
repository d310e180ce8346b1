"""The mechanism of each layer: one for all of them, or those of a pattern (`alternating`).

Instead of a mechanism and its options, a config or a checkpoint may have the name `alternating`,
`layers`, a list of mechanisms, and `options`, theirs by name. Layers have the mechanisms in turn,
and the last round may be incomplete: `[window, window, hybrid]` in 8 layers has two of hybrid.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, NamedTuple, Self, final

from protlm.attention import ALTERNATING, mechanism, names
from protlm.attention.base import Attention, Recurrent
from protlm.config.fields import check_types
from protlm.system.errors import OptionError, UserError, one_of


class LayerMechanism(NamedTuple):
    """The mechanism of a layer, by name, with its options and where a user sets them."""

    name: str
    options: dict[str, Any]
    group: str


@final
@dataclass(frozen=True)
class _Pattern:
    """The settings of `alternating`."""

    layers: list[str]
    options: dict[str, Any]

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Checks settings as a config or a checkpoint has them, but not the options themselves."""
        settings = {key: value for key, value in settings.items() if key != "name"}
        if unknown := sorted(settings.keys() - {"layers", "options"}):
            raise UserError(
                f"attention.{unknown[0]} is not a setting of {ALTERNATING}; it has: layers, "
                "options; those of its mechanisms are in attention.options.NAME"
            )
        try:
            check_types(cls, settings)
        except OptionError as error:
            raise UserError(error.sentence("attention.")) from None
        found = cls(settings.get("layers") or [], settings.get("options") or {})
        listed = f"attention.layers=[{','.join(map(str, found.layers))}]"
        other = [name for name in found.layers if name not in names()]
        if other or not found.layers:
            what = f"contains {other[0]}" if other else "is empty"
            raise UserError(f"{listed} {what}; give a list of mechanisms: {one_of(names())}")
        for name, options in found.options.items():
            if name not in found.layers:
                raise UserError(
                    f"attention.options.{name} has no effect with {listed}, whose settings are "
                    f"attention.options.NAME.SETTING, NAME one of: {one_of([*{*found.layers}])}"
                )
            if not isinstance(options, Mapping):
                raise UserError(f"attention.options.{name}={options} must be a group of settings")
        return found


def mechanisms_of(attention: Mapping[str, Any], num_layers: int) -> list[LayerMechanism]:
    """Returns the mechanism of each layer, of settings that include the name."""
    if attention.get("name") != ALTERNATING:
        options = {key: value for key, value in attention.items() if key != "name"}
        kinds = [LayerMechanism(str(attention.get("name", "")), options, "attention")]
    else:
        pattern = _Pattern.of(attention)
        if len(pattern.layers) > num_layers:
            raise UserError(
                f"attention.layers has {len(pattern.layers)} mechanisms, but the model has "
                f"{num_layers} layers (model.num_layers); give at most one for each layer"
            )
        kinds = [
            LayerMechanism(name, pattern.options.get(name, {}), f"attention.options.{name}")
            for name in pattern.layers
        ]
    in_turn = islice(cycle(kinds), num_layers)
    return [_in_layer(kind, layer, num_layers) for layer, kind in enumerate(in_turn)]


def _in_layer(kind: LayerMechanism, layer: int, num_layers: int) -> LayerMechanism:
    """Returns the mechanism of a layer, numbered from 0: lists may have a value for each layer."""
    chosen = dict(kind.options)
    for option in mechanism(kind.name).per_layer_options:
        values = kind.options.get(option)
        if isinstance(values, list):
            if len(values) != num_layers:
                raise UserError(
                    f"{kind.group}.{option} has {len(values)} values, but the model has "
                    f"{num_layers} layers (model.num_layers); give one value for each layer, or "
                    "one for all"
                )
            chosen[option] = values[layer]
    return kind._replace(options=chosen)


def unable(
    attention: Mapping[str, Any], num_layers: int, is_able: Callable[[type[Attention]], bool]
) -> str | None:
    """Returns the first mechanism of the layers that is not able to do something, or None."""
    for one in mechanisms_of(attention, num_layers):
        if not is_able(mechanism(one.name)):
            return f"{'attention' if one.group == 'attention' else 'attention.layers'}={one.name}"
    return None


def cannot_decode(attention: Mapping[str, Any], num_layers: int) -> str | None:
    """Returns the first mechanism of the layers without a state for step-by-step decoding."""
    return unable(attention, num_layers, lambda kind: issubclass(kind, Recurrent))


def attention_label(attention: Mapping[str, Any]) -> str:
    """Returns the mechanism of a model, with the pattern of its layers and decays, for a reader."""
    name, options = str(attention["name"]), attention.get("options") or {}
    if name == ALTERNATING:
        kinds = ({"name": one, **options.get(one, {})} for one in attention["layers"])
        return f"{name} [{','.join(map(attention_label, kinds))}]"
    decay = {**attention, **options}.get("decay", "none")
    return name if decay == "none" else f"{name} with {decay} decay"


def meaning(attention: Mapping[str, Any], num_layers: int) -> str:
    """Returns what an entry of a map means, by mechanism if that differs between layers."""
    kinds = dict.fromkeys(one.name for one in mechanisms_of(attention, num_layers))
    meanings = {name: mechanism(name).map_meaning for name in kinds}
    if len(set(meanings.values())) == 1:
        return next(iter(meanings.values()))
    return "; ".join(f"in layers of {name}, {text}" for name, text in meanings.items())


def stored_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that decide what is computed, as a saved model has them."""
    if name != ALTERNATING:
        return mechanism(name).stored_options(options)
    chosen = _Pattern.of(options).options
    stored = {one: mechanism(one).stored_options(chosen[one]) for one in chosen}
    return {**options, "options": {one: left for one, left in stored.items() if left}}


def option_differences(
    name: str, found: Mapping[str, Any], asked: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """Returns the options that make two mechanisms of one name compute different functions.

    Each with its value in `found` and in `asked`, where a missing option has its default.
    """
    if name == ALTERNATING:
        one, other = _Pattern.of(found), _Pattern.of(asked)
        if one.layers != other.layers:
            return [("layers", one.layers, other.layers)]
        return [
            (f"options.{kind}.{option}", there, here)
            for kind in dict.fromkeys(one.layers)
            for option, there, here in option_differences(
                kind, one.options.get(kind, {}), other.options.get(kind, {})
            )
        ]
    cls = mechanism(name)
    defaults = {key: p.default for key, p in inspect.signature(cls).parameters.items()}

    def value(options: Mapping[str, Any], option: str) -> Any:
        chosen = options.get(option, defaults.get(option))
        # An empty list or group is that of the YAML file for null.
        return None if chosen in ([], {}) else chosen

    found, asked = cls.stored_options(found), cls.stored_options(asked)
    pairs, inner = [], value(found, "mechanism")
    if inner and inner == value(asked, "mechanism"):
        both = (options.pop("options", None) or {} for options in (found, asked))
        pairs = [(f"options.{option}", *two) for option, *two in option_differences(inner, *both)]
    pairs += [(one, value(found, one), value(asked, one)) for one in {**found, **asked}]
    return [(option, there, here) for option, there, here in pairs if there != here]
