"""Options that several commands share."""

from enum import StrEnum
from pathlib import Path

from protlm.config.data import TOKENS_PER_BATCH
from protlm.config.fields import at_least, flag
from protlm.system.errors import UserError
from protlm.system.paths import check_output

_FIGURES = {".png", ".pdf", ".svg"}


# The treatment of repeated identifiers; `header` names every record by its whole header.
Duplicates = StrEnum("Duplicates", ["error", "first", "suffix", "header"])


def device() -> str:
    """Defines the device of a model."""
    return flag("The device: auto, cpu, cuda (or gpu), cuda:1, ...", "auto")


def duplicates() -> Duplicates:
    """Defines what is done with repeated identifiers."""
    return flag(
        "Repeated identifiers: error, first (skip the others), suffix (ID_2); or header: name all "
        "proteins by the whole header, not by its first word.",
        Duplicates.error,
    )


def tokens_per_batch(default: int = TOKENS_PER_BATCH) -> int:
    """Defines the size of a batch."""
    return flag(
        "Tokens per batch, including padding.", default, "--toks-per-batch", allowed=at_least(1)
    )


def seed(help: str) -> int:
    """Defines a seed."""
    return flag(help, 0, allowed=at_least(0))


def dry_run(help: str = "Print the time and memory that are needed, and compute nothing.") -> bool:
    """Defines that a command only says what it would do."""
    return flag(help, False)


def break_lock() -> bool:
    """Defines that a lock is taken over."""
    return flag(
        "Take over a lock from another machine; first make sure that no process runs there.", False
    )


def chain() -> str | None:
    """Defines the chain of a structure."""
    return flag("The chain (mmCIF: auth_asym_id); default: the first protein chain.", None)


def layers(help: str = "Layers, from 1; -1 is the last. Default: all.") -> tuple[int, ...] | None:
    """Defines the layers of a model; None is all."""
    return flag(help, None)


def heads() -> tuple[int, ...] | None:
    """Defines the heads of attention; None is all."""
    return flag("Heads, from 1. Default: all.", None)


def figure(help: str) -> Path | None:
    """Defines a figure that is drawn as well."""
    return flag(help, None, read=new_figure)


def new_figure(path: str | Path) -> Path:
    """Returns the path of a figure; refuses one that cannot be written, or of another name."""
    path = Path(path)
    check_output(path)
    if path.suffix.lower() not in _FIGURES:
        raise UserError(
            f"{path} is not a figure by its name; type: --figure {path.with_suffix('.png')}"
        )
    return path
