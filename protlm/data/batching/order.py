"""The order of samples: a permutation that is computed on demand.

It is a balanced Feistel network over the smallest power of four that is at least the number of
samples, with cycle walking: a value outside the range is encrypted again until it is inside (Black
and Rogaway 2002, "Ciphers with arbitrary finite domains", method 2). The 250 million samples of
TrEMBL therefore need no list in memory.
"""

from collections.abc import Iterable
from typing import Any, final

import numpy as np

_NUM_ROUNDS = 8
# A network over fewer than 64 values has too few permutations to look random.
_MIN_HALF_BITS = 3


@final
class EpochOrder:
    """A permutation of `range(num_samples)`, a pure function of (seed, epoch, stream)."""

    def __init__(self, num_samples: int, *, seed: int, epoch: int, stream: int = 0) -> None:
        self._num_samples = num_samples
        half_bits = max((max(num_samples - 1, 1).bit_length() + 1) // 2, _MIN_HALF_BITS)
        self._half_bits = np.uint64(half_bits)
        entropy = np.random.SeedSequence([seed % 2**64, epoch], spawn_key=(stream,))
        self._keys = entropy.generate_state(_NUM_ROUNDS, np.uint64)

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        """Returns the samples at these positions of the epoch, int64."""
        assert np.all((positions >= 0) & (positions < self._num_samples))
        samples = _enciphered(positions.astype(np.uint64), self._half_bits, self._keys)
        while np.any(is_outside := samples >= np.uint64(self._num_samples)):
            samples[is_outside] = _enciphered(samples[is_outside], self._half_bits, self._keys)
        return samples.astype(np.int64)


def permuted(places: np.ndarray, sizes: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns the item at each place of its own permutation, int64.

    Each place is in an order of a number of items, `sizes`, that is drawn by a key, uint64.
    """
    half_bits = np.maximum(np.ceil(np.log2(sizes) / 2), _MIN_HALF_BITS).astype(np.uint64)
    items, left = places.astype(np.uint64), np.arange(len(places))
    while len(left):
        rounds = (splitmix64(keys[left] + np.uint64(number)) for number in range(_NUM_ROUNDS))
        items[left] = _enciphered(items[left], half_bits[left], rounds)
        left = left[items[left] >= sizes[left].astype(np.uint64)]
    return items.astype(np.int64)


def _enciphered(values: np.ndarray, half_bits: Any, keys: Iterable[Any]) -> np.ndarray:
    half_mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & half_mask
    for key in keys:
        left, right = right, left ^ (splitmix64(right + key) & half_mask)
    return (left << half_bits) | right


def hashed(items: np.ndarray, *, seed: int, stream: int = 0) -> np.ndarray:
    """Returns a random number for each item, uint64: a pure function of (seed, stream, item)."""
    entropy = np.random.SeedSequence([seed % 2**64], spawn_key=(stream, 1))
    first, second = entropy.generate_state(2, np.uint64)
    return splitmix64(splitmix64(items.astype(np.uint64) + first) + second)


def splitmix64(values: np.ndarray) -> np.ndarray:
    """Applies the finalizer of SplitMix64 (Steele et al. 2014) to uint64 values.

    >>> int(splitmix64(np.array([1], np.uint64))[0])
    6238072747940578789
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
