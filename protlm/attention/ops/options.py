"""Checks of options that several mechanisms have."""

from protlm.system.errors import UserError


def require_at_least(
    option: str, value: int | None, least: int, *, example: int, otherwise: str = ""
) -> None:
    """Checks that an option is at least a number; None passes.

    Args:
        option: the name of the option.
        value: the option.
        least: the smallest allowed value.
        example: the value that the message suggests.
        otherwise: the alternative that the message suggests.
    """
    if value is not None and value < least:
        raise UserError(
            f"attention.{option}={value} must be at least {least}; type "
            f"attention.{option}={example}{otherwise and f', or {otherwise}'}"
        )
