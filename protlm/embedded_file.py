"""The proteins of a file with their vectors, one after the other."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from protlm.data.records import Record
from protlm.data.records.proteins import Proteins
from protlm.model.embedding import Embedder, Vectors, batches
from protlm.system.terminal import printable

# The number of records of a file that are sorted by length at a time, which bounds the memory.
_WINDOW = 2_048


class EmbeddedProtein(NamedTuple):
    """A record of a file, and its vectors: (D,), or (L, D) of its residues."""

    record: Record
    vectors: np.ndarray


class EmbeddedFile:
    """The proteins of a file with their vectors, in the order of the file.

    Every record is yielded or in `skipped`, with the reason; those that do not fit into the memory
    are added while the file is iterated. Equal sequences that are near each other are computed
    once. The memory does not grow with the file. Vectors that are not finite are a `UserError`.
    """

    def __init__(self, embedder: Embedder, proteins: Proteins, tokens_per_batch: int) -> None:
        self._embedder, self._proteins = embedder, proteins
        self._tokens_per_batch = tokens_per_batch
        self.skipped = proteins.without_entry()

    def __len__(self) -> int:
        return len(self._proteins)

    def __iter__(self) -> Iterator[EmbeddedProtein]:
        self.skipped = self._proteins.without_entry()
        (kind,), (layer,) = self._embedder.poolings, self._embedder.layers
        records = iter(self._proteins)
        while window := list(islice(records, _WINDOW)):
            distinct = list(dict.fromkeys(record.sequence for record in window))
            found = embed_all(self._embedder, distinct, self._tokens_per_batch)
            vectors = dict(zip(distinct, found, strict=True))
            for record in window:
                one = vectors[record.sequence]
                if one is None:
                    reason = self._embedder.room.reason(len(record.sequence))
                    self.skipped.append((record.identifier, reason))
                else:
                    self._embedder.check_finite(one, printable(record.identifier))
                    yield EmbeddedProtein(record, one[kind, layer].numpy())


def embed_all(
    embedder: Embedder, sequences: Sequence[str], tokens_per_batch: int
) -> list[Vectors | None]:
    """Returns the vectors of each sequence in order, None where it does not fit into the memory."""
    found: list[Vectors | None] = [None] * len(sequences)
    for some in batches([len(one) for one in sequences], tokens_per_batch):
        computed = embedder.vectors([sequences[index] for index in some])
        for index, vectors in zip(some, computed, strict=True):
            found[index] = vectors
    return found
