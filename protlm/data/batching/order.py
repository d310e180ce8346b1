"""The order of samples: a permutation that is computed on demand.

It is a balanced Feistel network over the smallest power of four that is at least the number of
samples, with cycle walking: a value outside the range is encrypted again until it is inside (Black
and Rogaway 2002, "Ciphers with arbitrary finite domains", method 2). The 250 million samples of
TrEMBL therefore need no list in memory.
"""

from typing import final

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
        self._half_mask = np.uint64((1 << half_bits) - 1)
        entropy = np.random.SeedSequence([seed % 2**64, epoch], spawn_key=(stream,))
        self._keys = entropy.generate_state(_NUM_ROUNDS, np.uint64)

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        """Returns the samples at these positions of the epoch, int64."""
        assert np.all((positions >= 0) & (positions < self._num_samples))
        samples = self._encipher(positions.astype(np.uint64))
        while np.any(is_outside := samples >= np.uint64(self._num_samples)):
            samples[is_outside] = self._encipher(samples[is_outside])
        return samples.astype(np.int64)

    def _encipher(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half_bits, values & self._half_mask
        for key in self._keys:
            left, right = right, left ^ (splitmix64(right + key) & self._half_mask)
        return (left << self._half_bits) | right


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
