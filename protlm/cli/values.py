"""What several commands read in the same way."""

from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from protlm.system.errors import UserError

Choice = TypeVar("Choice", bound=StrEnum)


def choice(flag: str, value: str, choices: type[Choice]) -> Choice:
    """Returns the member of an enumeration that was typed."""
    try:
        return choices(value)
    except ValueError:
        allowed = ", ".join(choice.value for choice in choices)
        raise UserError(f"{flag} {value} is not one of {allowed}") from None


def model_or_default(given: Path | None) -> Path:
    """Returns the model to use; without `-m` it is the shipped one, which is printed."""
    if given is not None:
        return given
    from protlm.commands.models import announced_default

    return announced_default("-m MODEL")


def map_dtype(value: str) -> str:
    """Returns the dtype of attention maps."""
    if value not in ("float32", "float16"):
        raise UserError(f"--dtype {value} is not one of float32, float16")
    return value
