"""What options allow, beside their types in a constructor: a range of numbers, or names.

`window: Annotated[int, even(2)] = 512` is an even number of at least 2, and
`sharing: Annotated[str, Sharing] = "layers"` a member of an enumeration.
"""

import inspect
from collections.abc import Mapping
from typing import Any, get_type_hints

from protlm.config.fields import Range, check_types
from protlm.system.errors import UserError, refuse_unknown


def even(low: int) -> Range:
    """Returns the even numbers from `low` on."""
    return Range(f"even and at least {low}", lambda x: x >= low and x % 2 == 0)


def odd(low: int) -> Range:
    """Returns the odd numbers from `low` on."""
    return Range(f"odd and at least {low}", lambda x: x >= low and x % 2 == 1)


def check_options(kind: type, options: Mapping[str, Any]) -> None:
    """Refuses options of a type or value that a constructor does not allow.

    Null is compared with the types alone.
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
