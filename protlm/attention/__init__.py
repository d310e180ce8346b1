"""Attention mechanisms with one interface: each is one Python file and one YAML file.

`names()` lists them and `create()` builds one. `layers` combines several in one model.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_type_hints

from protlm.attention.base import Attention
from protlm.config.choices import choices, class_of
from protlm.config.fields import Range, check_types
from protlm.system.errors import UserError, one_of, refuse_unknown

__all__ = ["Attention", "create", "mechanism", "names", "settings_within"]

# A pattern of mechanisms, one for each layer, in place of one mechanism.
ALTERNATING = "alternating"

_FROM_THE_MODEL = ("num_heads", "head_dim", "model_dim", "max_length", "seed")


def names() -> list[str]:
    """Returns the names of the mechanisms, also of those that installed packages add."""
    return [name for name in choices("attention") if name != ALTERNATING]


def mechanism(name: str) -> type[Attention]:
    """Returns the class of a mechanism."""
    if name == ALTERNATING:
        raise UserError(f"attention={name} is a pattern of mechanisms; choose that of a layer")
    return class_of("attention", name, Attention, names())


@contextmanager
def settings_within(group: str, *, chosen: str = "attention") -> Iterator[None]:
    """Names settings in errors as the user wrote them: those of a mechanism within another.

    They are options of `group` rather than of `attention`, and `chosen` has the name.
    """
    try:
        yield
    except UserError as error:
        message = re.sub(r"\battention\.(?=[a-z_]+\b)", f"{group}.", str(error))
        raise type(error)(message.replace("attention=", f"{chosen}=")) from error


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
        UserError: an unknown name or option, a value of the wrong type, or an impossible setting.
    """
    cls = mechanism(name)
    accepted = list(inspect.signature(cls).parameters)
    allowed = [p for p in accepted if p not in _FROM_THE_MODEL]
    if unknown := sorted(set(options) - set(allowed)):
        raise UserError(
            f"attention.{unknown[0]} is not a setting of {name}; it has: {one_of(allowed)}"
            + ", those of its mechanism" * ("options" in allowed)
        )
    _check_options(cls, options)
    sizes = {
        "num_heads": num_heads,
        "head_dim": head_dim,
        "model_dim": model_dim,
        "max_length": max_length,
        "seed": seed,
    }
    try:
        return cls(**{key: sizes[key] for key in accepted if key in sizes}, **options)
    except TypeError as error:
        raise UserError(f"attention={name}: {error}; settings: {one_of(allowed)}") from error


def _check_options(kind: type, options: Mapping[str, Any]) -> None:
    """Refuses options of a type or value that a constructor does not allow.

    Beside the types these are ranges, `window: Annotated[int, even(2)] = 512`, or the members of an
    enumeration, `sharing: Annotated[str, Sharing] = "layers"`. Null is compared with types alone.
    """
    check_types(kind, options, section="attention")
    defaults = inspect.signature(kind).parameters
    annotations = get_type_hints(kind.__init__, include_extras=True)
    for option, value in options.items():
        for allowed in getattr(annotations[option], "__metadata__", ()):
            if value is None:
                continue
            if not isinstance(allowed, Range):
                refuse_unknown(f"attention.{option}", value, allowed)
            elif value not in allowed:
                default = defaults[option].default
                raise UserError(
                    f"attention.{option}={value} must be {allowed.expected(value)}; "
                    f"type attention.{option}={'null' if default is None else default}"
                )
