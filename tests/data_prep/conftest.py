"""Fixtures for the tests of data preparation."""

import pytest

from protlm.data.records import splitting


@pytest.fixture
def small_blocks(monkeypatch) -> None:
    """Cuts files into blocks of 4 KiB, so that small ones have many."""
    monkeypatch.setattr(splitting, "BLOCK_BYTES", 1 << 12)
