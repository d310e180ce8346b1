"""What features are compared with beside another model: neurons, components, and positions."""

from collections.abc import Sequence

import numpy as np

_FROM_ENDS = (1, 2, 3, 5, 10, 20, 30, 50, 100)


def neurons(states_LD: np.ndarray) -> np.ndarray:
    """Returns each component above its mean, and below it, [residues, 2 D]."""
    centered = states_LD - states_LD.mean(axis=0)
    return np.concatenate([centered, -centered], axis=1)


def components(states_LD: np.ndarray) -> np.ndarray:
    """Returns each principal component above its mean, and below it, [residues, 2 D]."""
    centered = states_LD - states_LD.mean(axis=0)
    return neurons(centered @ np.linalg.eigh(centered.T @ centered)[1])


def positions(places: Sequence[np.ndarray]) -> np.ndarray:
    """Returns whether residues, from 0, are among the first or the last few of their protein."""
    first, last = np.concatenate(places), np.concatenate([one[::-1] for one in places])
    return np.stack([x < n for x in (first, last) for n in _FROM_ENDS], axis=1).astype(np.float32)
