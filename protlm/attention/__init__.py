"""Attention mechanisms with one interface: each is one Python file and one YAML file.

`names()` lists them and `create()` builds one. `layers` combines several in one model.
"""

import inspect
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, get_type_hints

from protlm.attention.base import Attention
from protlm.config.choices import choices, class_of
from protlm.config.fields import Range, check_types
from protlm.system.errors import OptionError, UserError, one_of

__all__ = ["Attention", "create", "mechanism", "names"]

# A pattern of mechanisms, one for each layer, in place of one mechanism.
ALTERNATING = "alternating"


def names() -> list[str]:
    """Returns the names of the mechanisms, also of those that installed packages add."""
    return [name for name in choices("attention") if name != ALTERNATING]


def mechanism(name: str) -> type[Attention]:
    """Returns the class of a mechanism."""
    if name == ALTERNATING:
        raise UserError(f"attention={name} is a pattern of mechanisms; choose that of a layer")
    return class_of("attention", name, Attention, names())


def create(
    name: str,
    options: Mapping[str, Any],
    *,
    num_heads: int,
    head_dim: int,
    model_dim: int,
    max_length: int,
    seed: int = 0,
) -> Attention:
    """Builds a mechanism; options are those of its YAML file, without the name.

    `max_length` is the longest input, for tables of positions, and random projections depend on
    `seed` and the redraw index.

    Raises:
        UserError: an unknown name.
        OptionError: an unknown option, a value of the wrong type, or an impossible setting.
    """
    cls = mechanism(name)
    accepted = list(inspect.signature(cls).parameters)
    sizes = {
        "num_heads": num_heads,
        "head_dim": head_dim,
        "model_dim": model_dim,
        "max_length": max_length,
        "seed": seed,
    }
    allowed = [p for p in accepted if p not in sizes]
    if unknown := sorted(set(options) - set(allowed)):
        raise OptionError(
            f"{unknown[0]} is not a setting of {name}; it has: {one_of(allowed)}"
            + (", those of its mechanism" if "options" in allowed else "")
        )
    _check_options(cls, options)
    try:
        return cls(**{key: sizes[key] for key in accepted if key in sizes}, **options)
    except TypeError as error:
        raise UserError(f"{name}: {error}; settings: {one_of(allowed)}") from error


def _check_options(kind: type, options: Mapping[str, Any]) -> None:
    """Refuses options of a type or value that a constructor does not allow.

    Beside the types these are ranges, `window: Annotated[int, even(2)] = 512`, or the members of an
    enumeration, `sharing: Annotated[str, Sharing] = "layers"`. Null is compared with types alone.
    """
    check_types(kind, options)
    defaults = inspect.signature(kind).parameters
    annotations = get_type_hints(kind.__init__, include_extras=True)
    for option, value in options.items():
        for allowed in getattr(annotations[option], "__metadata__", ()):
            if value is not None:
                _check_value(option, value, allowed, defaults[option].default)


def _check_value(option: str, value: Any, allowed: Range | type[StrEnum], default: Any) -> None:
    if isinstance(allowed, Range):
        if value not in allowed:
            typed = "null" if default is None else default
            raise OptionError(
                lambda at: (
                    f"{at}{option}={value} must be {allowed.expected(value)}; "
                    f"type {at}{option}={typed}"
                )
            )
    elif value not in [*allowed]:
        raise OptionError(f"{option}={value} does not exist; there are: {one_of([*allowed])}")
