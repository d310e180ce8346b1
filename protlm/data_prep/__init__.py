"""Data preparation. In a checkout its modules are in `data_prep/`; the wheel has them here."""

# ruff: noqa: F401

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Type checkers do not follow __path__; these modules are imported from outside data_prep.
    from data_prep import encode, leakage, merge, mmseqs, prepare, sources, split

__path__ = [str(Path(__file__).resolve().parents[2] / "data_prep")]
