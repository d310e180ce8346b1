"""What heads attend to: statistics over proteins, and groups of similar maps.

Similarity is the correlation of maps that are pooled to a fixed size.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from protlm.analysis.contact_regression import features
from protlm.analysis.head_statistics import layer_statistics
from protlm.analysis.precision import precision_at
from protlm.analysis.structures import Protein
from protlm.attention.ops.numerics import in_float64
from protlm.model.pretrained import PretrainedModel
from protlm.system.terminal import watched

POOLED = 64


@final
@dataclass
class HeadSurvey:
    """The `head_statistics` and `sink_mass` of proteins, [proteins, N, H], and pooled maps HPP.

    The precisions are P@L of the map of each head alone, symmetrized and corrected, over pairs 6 or
    more apart, [proteins, N, H]: NaN without a pair, empty without structures.
    """

    statistics: dict[str, np.ndarray]
    precisions: np.ndarray
    pooled: list[np.ndarray] = field(default_factory=list)

    def means(self) -> dict[str, np.ndarray]:
        """Returns means over the proteins where a value exists, NH or NHO."""
        found = {}
        precisions = {"contact_precision": self.precisions} if self.precisions.size else {}
        for name, values in (self.statistics | precisions).items():
            counts = (~np.isnan(values)).sum(axis=0)
            sums = np.nansum(values, axis=0)
            found[name] = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
        return found


def survey_heads(model: PretrainedModel, proteins: Sequence[Protein], what: str) -> HeadSurvey:
    """Measures all heads on each protein: all proteins have structures, or none has.

    The maps of one layer are in memory. `what` names the job for the display of progress.
    """
    statistics: dict[str, list[np.ndarray]] = {}
    precisions, pooled = [], []
    for protein in watched(what, proteins):
        contacts_LL = None if protein.structure is None else protein.contacts()
        layers, cells, alone = [], [], []
        for _, map_HLL, found in layer_statistics(model, protein.sequence):
            layers.append(found)
            cells.append(pool(map_HLL))
            if contacts_LL is not None:
                # One head at a time, because the correction needs several float64 copies.
                maps = (features(map_LL.numpy())[0] for map_LL in map_HLL.cpu())
                alone.append([precision_at(one, contacts_LL) for one in maps])
        for name in layers[0]:
            values = torch.stack([layer[name] for layer in layers]).numpy()
            statistics.setdefault(name, []).append(values)
        pooled.append(np.concatenate(cells))
        precisions += [np.array(alone)] if alone else []
    stacked = {name: np.stack(values) for name, values in statistics.items()}
    return HeadSurvey(stacked, np.array(precisions), pooled)


def pool(map_HLL: Tensor) -> np.ndarray:
    """Returns maps averaged in P × P cells of about equal size, P = 64 at most, float64 HPP."""
    map_HLL, length = in_float64(map_HLL), map_HLL.shape[2]
    size = min(POOLED, length)
    cells_LP = F.one_hot(torch.arange(length, device=map_HLL.device) * size // length).double()
    cells_LP /= cells_LP.sum(dim=0)
    return (cells_LP.T @ map_HLL @ cells_LP).cpu().numpy()


def head_distances(pooled: Iterable[np.ndarray]) -> np.ndarray:
    """Returns 1 - the correlation of two heads' pooled maps HPP, averaged over proteins, HH.

    H counts the heads of all layers. The correlation with a constant map is 0.
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

    if len(distances_HH) == 1:
        return np.ones(1, dtype=np.int64)
    number = min(number, len(distances_HH))
    model = AgglomerativeClustering(n_clusters=number, metric="precomputed", linkage="average")
    labels = model.fit_predict(distances_HH)
    order = {label: place for place, label in enumerate(dict.fromkeys(labels.tolist()), start=1)}
    return np.array([order[label] for label in labels.tolist()])
