"""All heads of a model over some proteins: statistics, pooled maps, and contact precision."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch
from torch import Tensor

from protlm.analysis.contact_regression import MIN_SEPARATION, features
from protlm.analysis.head_clusters import PooledMap
from protlm.analysis.head_statistics import head_statistics, residue_blocks
from protlm.analysis.precision import precision
from protlm.analysis.proteins import Protein
from protlm.model.pretrained import PretrainedModel
from protlm.system.terminal import JobProgress

ALL_SEPARATIONS = (MIN_SEPARATION, None)


@final
@dataclass
class HeadSurvey:
    """The results of every protein, first axis of the arrays.

    Attributes:
        statistics: the `head_statistics` and `sink_mass` by name, [proteins, N, H];
            `offset_profile` has O more.
        precisions: P@L of the map of each head alone, symmetrized and corrected, over pairs 6 or
            more apart, [proteins, N, H]; NaN without a pair; empty without structures.
        pooled: the pooled maps of all heads, HPP, of each protein.
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
    """Measures all heads on each protein.

    Without structures, memory is linear in the length; with them, the maps of one layer are held.

    Args:
        model: the model.
        proteins: the proteins; all of them have structures, or none has.
        what: the name of the job for the display of progress.
    """
    statistics: dict[str, list[np.ndarray]] = {}
    precisions, pooled = [], []
    with JobProgress(what, len(proteins)) as progress:
        for done, protein in enumerate(proteins, start=1):
            layers, maps, alone = _of_protein(model, protein)
            for name in layers[0]:
                values = torch.stack([layer[name] for layer in layers]).numpy()
                statistics.setdefault(name, []).append(values)
            pooled.append(np.concatenate(maps))
            precisions += [np.array(alone)] if alone else []
            progress.update(done)
    stacked = {name: np.stack(values) for name, values in statistics.items()}
    return HeadSurvey(stacked, np.array(precisions), pooled)


def _of_protein(
    model: PretrainedModel, protein: Protein
) -> tuple[list[dict[str, Tensor]], list[np.ndarray], list[list[float]]]:
    statistics, pooled, precisions = [], [], []
    for _, blocks in residue_blocks(model, protein.sequence):
        watched, kept = PooledMap(), []
        source = blocks if protein.structure is None else _kept(blocks, kept)
        found = head_statistics(watched.watch(source))
        statistics.append({**found, "sink_mass": blocks.sink_mass()})
        pooled.append(watched.means())
        if protein.structure is not None:
            map_HLL = torch.cat(kept, dim=1)
            kept.clear()
            precisions.append(head_precisions(map_HLL, protein.contacts()))
    return statistics, pooled, precisions


def _kept(blocks: Iterable[Tensor], kept: list[Tensor]) -> Iterator[Tensor]:
    for block_HML in blocks:
        kept.append(block_HML.float().cpu())
        yield block_HML


def head_precisions(map_HLL: Tensor, contacts_LL: np.ndarray) -> list[float]:
    """Returns P@L of each head's corrected map over pairs 6 or more apart."""
    found = []
    # One head at a time, because the correction needs several float64 copies.
    for map_LL in map_HLL:
        scores_LL = features(map_LL.numpy()[None, None])[0]
        hits, count = precision(scores_LL, contacts_LL, separation=ALL_SEPARATIONS, divisor=1)
        found.append(hits / count if count else np.nan)
    return found
