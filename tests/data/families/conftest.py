"""A query, and the text of families."""

from collections.abc import Callable
from pathlib import Path

import pytest

from protlm.data.families import Family, read_family
from protlm.options.relatives import FamilyOptions

QUERY = "MKTAYIAKQRQISFVKSHFS"


def fasta(*sequences: str, names: str = "qabcdefgh") -> str:
    """Returns the text of a FASTA file."""
    return "".join(f">{name}\n{one}\n" for name, one in zip(names, sequences, strict=False))


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Family]:
    """Reads the text of a file as the family of a query, by default QUERY."""

    def read_text(
        text: str | bytes, query: str | None = QUERY, file: str = "family.fasta", **options: object
    ) -> Family:
        path = tmp_path / file
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return read_family(path, query, "Q1", FamilyOptions(**options))

    return read_text
