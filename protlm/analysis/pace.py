"""How long a model takes for a token of proteins of any length, measured on a few batches."""

import time
from collections.abc import Callable

import numpy as np

from protlm.data.vocabulary import STANDARD
from protlm.model.embedding import Embedder

# Lengths of the random proteins in batches that are timed.
_LENGTHS = (128, 512, 1_024, 2_048)
# Time per token must grow by this factor, from the shortest to the longest, to count as growth;
# less is noise.
_GROWS = 1.5


def token_seconds(embedder: Embedder, tokens_per_batch: int) -> Callable[[int], float]:
    """Returns a function from the length of a protein to the seconds of a token, a line."""
    limit, around = embedder.model.max_residues, embedder.model.vocabulary.num_around
    sizes = sorted({min(n, limit or n) for n in _LENGTHS})
    rng, seconds = np.random.default_rng(0), []
    for length in sizes:
        rows = max(1, tokens_per_batch // (length + around))
        some = ["".join(rng.choice(list(STANDARD), length)) for _ in range(rows)]
        # The first pass also fills the caches of the libraries.
        _pass(embedder, some)
        seconds.append(_pass(embedder, some) / (rows * (length + around)))
    line = _line(sizes, seconds)
    return lambda length: float(np.polyval(line, min(length, limit or length)))


def _pass(embedder: Embedder, sequences: list[str]) -> float:
    start = time.perf_counter()
    embedder.vectors(sequences)
    return time.perf_counter() - start


def _line(sizes: list[int], values: list[float]) -> np.ndarray:
    """Returns slope and start of a line through values, constant if they hardly grow.

    The slope is used far beyond the last size.
    """
    if len(sizes) == 1 or values[-1] < _GROWS * values[0]:
        return np.array([0.0, float(np.median(values))])
    slope = (values[-1] - values[0]) / (sizes[-1] - sizes[0])
    return np.array([slope, max(values[-1] - slope * sizes[-1], 0.0)])
