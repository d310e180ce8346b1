"""Groups of similar heads, by the correlation of their maps pooled to a fixed size."""

from collections.abc import Iterable, Iterator
from typing import final

import numpy as np
import torch
from torch import Tensor

POOLED = 64


@final
class PooledMap:
    """A map of any length, averaged in P × P cells of about equal size, P = 64 at most."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._rows = 0

    def watch(self, blocks: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yields the blocks of rows, HML, while they are added."""
        for block_HML in blocks:
            heads, rows, length = block_HML.shape
            size = min(POOLED, length)
            columns_L = torch.arange(length, device=block_HML.device) * size // length
            if self._sums is None:
                self._counts = torch.bincount(columns_L, minlength=size).double()
                self._sums = self._counts.new_zeros(heads, size, size)
            narrow_HMP = self._sums.new_zeros(heads, rows, size)
            narrow_HMP.index_add_(2, columns_L, block_HML.double())
            self._sums.index_add_(1, columns_L[self._rows : self._rows + rows], narrow_HMP)
            self._rows += rows
            yield block_HML

    def means(self) -> np.ndarray:
        """Returns the averages, float64 HPP."""
        assert self._sums is not None, "no block of rows"
        return (self._sums / self._counts[:, None] / self._counts).cpu().numpy()


def head_distances(pooled: Iterable[np.ndarray]) -> np.ndarray:
    """Returns 1 - the correlation of two heads' pooled maps, averaged over proteins, HH.

    H counts the heads of all layers. The correlation with a constant map is 0.

    Args:
        pooled: for each protein the pooled maps of all heads, HPP.
    """
    distances = []
    for maps_HPP in pooled:
        flat = maps_HPP.reshape(len(maps_HPP), -1)
        flat = flat - flat.mean(axis=1, keepdims=True)
        norms = np.linalg.norm(flat, axis=1, keepdims=True)
        unit = np.where(norms > 1e-12, flat / np.where(norms == 0, 1, norms), 0.0)
        distances.append(1.0 - unit @ unit.T)
    mean_HH = np.mean(distances, axis=0)
    np.fill_diagonal(mean_HH, 0.0)
    return mean_HH


def head_clusters(distances_HH: np.ndarray, number: int) -> np.ndarray:
    """Returns the cluster of each head, from 1, by average linkage; int64 H.

    Clusters are numbered in the order of their first heads.
    """
    from sklearn.cluster import AgglomerativeClustering

    number = min(number, len(distances_HH))
    if len(distances_HH) == 1:
        return np.ones(1, dtype=np.int64)
    model = AgglomerativeClustering(n_clusters=number, metric="precomputed", linkage="average")
    labels = model.fit_predict(distances_HH)
    order = {label: place for place, label in enumerate(dict.fromkeys(labels.tolist()), start=1)}
    return np.array([order[label] for label in labels.tolist()])
