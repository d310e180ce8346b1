"""Builds four splits of sequences shorter than their digests: SOURCE OUT [LARGEST_FILE]."""

import sys
from pathlib import Path
from typing import Any

from protlm.data_prep import prepare
from protlm.errors import exit_with_message
from tests.faults.programs.file_size import limit_file_size


class Quarters:
    """A split rule by the first byte of the digest."""

    def split_of(self, record: Any, digest: bytes) -> str:
        """Returns one of four names."""
        return f"split_{digest[0] % 4}"

    def notes_of(self, record: Any, split: str) -> tuple[()]:
        """Returns nothing to note."""
        return ()

    def describe(self) -> dict[str, Any]:
        """Returns nothing to describe."""
        return {}


def build_quarters(source: str, out: str) -> None:
    """Builds a data set of four splits, without duplicates."""
    options = prepare.PrepareOptions(deduplicate=True)
    prepare.prepare([Path(source)], Path(out), split_rule=Quarters(), options=options)


if __name__ == "__main__":
    source, out, *limits = sys.argv[1:]
    for limit in limits:
        limit_file_size(int(limit))
    exit_with_message(lambda: build_quarters(source, out))
