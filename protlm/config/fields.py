"""Fields of settings: default, help text and allowed range in one place."""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from protlm.errors import UserError


@dataclass(frozen=True)
class Range:
    """The numbers that a setting allows.

    >>> 0 in at_least(0, below=1), 1 in at_least(0, below=1), str(at_least(0, below=1))
    (True, False, 'at least 0 and below 1')
    """

    text: str
    allows: Callable[[float], bool]

    def __contains__(self, value: float) -> bool:
        return self.allows(value)

    def __str__(self) -> str:
        return self.text


def at_least(low: float, *, below: float | None = None, at_most: float | None = None) -> Range:
    """Returns the range [low, ∞), [low, below) or [low, at_most]."""
    if below is not None:
        return Range(f"at least {low} and below {below}", lambda value: low <= value < below)
    if at_most is not None:
        return Range(f"at least {low} and at most {at_most}", lambda v: low <= v <= at_most)
    return Range(f"at least {low}", lambda value: value >= low)


def above(low: float) -> Range:
    """Returns the range (low, ∞)."""
    return Range(f"above {low}", lambda value: value > low)


def setting(help: str, default: Any = MISSING, *, allowed: Range | None = None) -> Any:
    """Defines a setting.

    Args:
        help: the sentence of docs/settings.md and of `protlm train --help`.
        default: the default value; without one, the YAML files must give a value.
        allowed: the range of allowed numbers.
    """
    metadata = {"help": help, "allowed": allowed}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


class Checked:
    """Settings whose numbers are compared with their allowed ranges when they are created."""

    _section = ""

    def __post_init__(self) -> None:
        for one in fields(self):  # pyright: ignore[reportArgumentType]
            allowed, value = one.metadata.get("allowed"), getattr(self, one.name)
            if allowed is not None and value is not None and value not in allowed:
                raise UserError(f"{self._section}{one.name}={value} must be {allowed}")
