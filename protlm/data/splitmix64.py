"""SplitMix64: a permutation of the 64-bit numbers that scatters them like random numbers."""

import numpy as np


def splitmix64(values: np.ndarray) -> np.ndarray:
    """Applies the finalizer of SplitMix64 (Steele et al. 2014) to uint64 values.

    >>> int(splitmix64(np.array([1], np.uint64))[0])
    6238072747940578789
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
