"""Detection of duplicate sequences by a hash table of digests, on disk when it is large."""

import mmap
from pathlib import Path

import numpy as np

from protlm.data.shards.cluster_index import release

# Slots of the first table, and those of the largest one in memory (128 MiB).
_FIRST_SLOTS, _MEMORY_SLOTS = 1 << 16, 1 << 23
_MAX_LOAD = 0.7
_SLOT_BYTES = 16
# Digests looked up between two releases of the pages of a table on disk; each loads up to 64 KiB.
_LOOKUPS = 1 << 11
_BLOCK = 1 << 16


class DigestSet:
    """A set of 128-bit digests that reports which of the added digests are new.

    It uses open addressing with linear probing. The slot of a digest is given by its highest bits,
    so digests in ascending order access the table sequentially, and so does growing it to twice the
    size. docs/decisions/0008-duplicates.md lists its costs.

    Args:
        path: file of a table that is too large for memory. It is created when needed, overwrites
            an existing file, and is replaced when the table grows.
        memory_slots: slots of the largest table that is kept in memory, a power of two.
    """

    def __init__(self, path: Path, *, memory_slots: int = _MEMORY_SLOTS) -> None:
        self._path, self._memory_slots = path, memory_slots
        self._pages: mmap.mmap | None = None
        self._table = np.zeros((min(_FIRST_SLOTS, memory_slots), 2), np.uint64)
        self._size = 0

    def add(self, digests: np.ndarray) -> np.ndarray:
        """Adds digests, uint64 [n, 2], and returns which of them are new, bool [n].

        Of equal digests, the first is new.
        """
        is_new = np.zeros(len(digests), bool)
        for start in range(0, len(digests), _LOOKUPS):
            block = digests[start : start + _LOOKUPS]
            while self._size + len(block) > _MAX_LOAD * len(self._table):
                self._grow()
            is_new[start : start + len(block)] = self._insert(block)
        return is_new

    def _insert(self, digests: np.ndarray) -> np.ndarray:
        """Adds digests that fit in the table, and returns which of them are new, bool [n]."""
        is_new = np.zeros(len(digests), bool)
        high, low = digests[:, 0], digests[:, 1]
        # Zeros mark an empty slot, so the digest of all zeros is replaced by another one.
        low = np.where(high | low, low, ~low)
        table_high, table_low = self._table[:, 0], self._table[:, 1]
        shift, last = np.uint64(65 - len(self._table).bit_length()), len(self._table) - 1
        home = (high >> shift).astype(np.int64)
        # Digests without a slot yet, sorted by their first slot and then by their order. All of
        # them advance by one slot per round, so two compete for a slot only if they started at the
        # same one, and of equal digests the first stays ahead.
        waiting = np.argsort(home, kind="stable")
        distance = 0
        while waiting.size:
            homes = home[waiting]
            slots = (homes + distance) & last
            is_first = np.concatenate(([True], homes[1:] != homes[:-1]))
            takes = is_first & (table_high[slots] | table_low[slots] == 0)
            new, into = waiting[takes], slots[takes]
            table_high[into], table_low[into], is_new[new] = high[new], low[new], True
            is_there = (table_high[slots] == high[waiting]) & (table_low[slots] == low[waiting])
            waiting = waiting[~is_there]
            distance += 1
        self._size += int(np.count_nonzero(is_new))
        release(self._pages)
        return is_new

    def _grow(self) -> None:
        """Moves all digests to a table of twice the size."""
        old, old_pages = self._table, self._pages
        self._table, self._pages = self._make_table(2 * len(old))
        self._size = 0
        for start in range(0, len(old), _BLOCK):
            block = old[start : start + _BLOCK]
            self._insert(block[block.any(axis=1)])
            release(old_pages)

    def _make_table(self, slots: int) -> tuple[np.ndarray, mmap.mmap | None]:
        if slots <= self._memory_slots:
            return np.zeros((slots, 2), np.uint64), None
        # The file is written in full: when the disk is full, writing to a hole of a mapped file
        # kills the process by SIGBUS. The mapping of the previous file outlives its name.
        self._path.unlink(missing_ok=True)
        with self._path.open("xb+") as file:
            zeros = bytes(_BLOCK)
            for start in range(0, slots * _SLOT_BYTES, _BLOCK):
                file.write(zeros[: slots * _SLOT_BYTES - start])
            file.flush()
            pages = mmap.mmap(file.fileno(), slots * _SLOT_BYTES)
        return np.frombuffer(pages, np.uint64).reshape(slots, 2), pages
