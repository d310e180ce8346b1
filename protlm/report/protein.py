"""The protein of a page: its sequence, its structure if one is known, and what a model predicts."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np

from protlm.analysis.dssp import secondary_structure
from protlm.analysis.structures import Structure, contact_map
from protlm.data.vocabulary import STANDARD, STANDARD_TOKENS
from protlm.downstream.estimators import LogProbabilities, Query
from protlm.model.pretrained import PretrainedModel
from protlm.system.terminal import watched

_SHORTEST_CONTACT = 3


@final
@dataclass(frozen=True, eq=False)
class InspectedProtein:
    """A protein to inspect.

    Its name and header may contain anything; the source is the name of its file, without the
    folder.
    """

    identifier: str
    header: str
    source: str
    sequence: str
    structure: Structure | None = None

    def __len__(self) -> int:
        return len(self.sequence)

    @cached_property
    def contacts(self) -> np.ndarray | None:
        """The contact map, int8 LL, as `contact_map` returns it; None without a structure."""
        return None if self.structure is None else contact_map(self.structure)

    def to_plain(self) -> dict[str, Any]:
        """Returns values for JSON; positions are from 0, contacts have i < j."""
        return {
            "identifier": self.identifier,
            "header": self.header,
            "source": self.source,
            "sequence": self.sequence,
            "structure": None if self.structure is None else self._structure(self.structure),
        }

    def _structure(self, structure: Structure) -> dict[str, Any]:
        assert self.contacts is not None
        rows, columns = np.nonzero(np.triu(self.contacts == 1, _SHORTEST_CONTACT))
        return {
            "ca": _coordinates(structure.backbone_L43[:, 1]),
            "cb": _coordinates(structure.cb_L3),
            "states": secondary_structure(structure.backbone_L43, structure.sequence),
            "contacts": np.stack([rows, columns], axis=1).tolist(),
        }


def _coordinates(atoms_L3: np.ndarray) -> list[list[float] | None]:
    return [
        None if np.isnan(atom_3).any() else [round(float(x), 2) for x in atom_3]
        for atom_3 in atoms_L3
    ]


_DECIMALS = 4


def predicted_distributions(model: PretrainedModel, sequence: str) -> np.ndarray:
    """Returns the probability of each of the 20 amino acids at each position, float64 [L, 20].

    A masked model predicts the residue at one masked position at a time, as `masked-marginals` in
    `protlm score`; this takes L passes. A causal model predicts it from the residues before it,
    in one pass. Rows sum to 1.
    """
    if model.causal:
        logits_LV = model(model.tokenize([sequence])).logits_BLV[0, model.vocabulary.before]
        log_p_L20 = logits_LV.cpu().double()[:, STANDARD_TOKENS].numpy()
    else:
        queries = [Query(sequence, position) for position in range(len(sequence))]
        found = LogProbabilities(model).log_p(watched("predictions", queries))
        log_p_L20 = np.stack([log_p_V[STANDARD_TOKENS] for _, log_p_V in found])
    p_L20 = np.exp(log_p_L20 - log_p_L20.max(axis=1, keepdims=True))
    return p_L20 / p_L20.sum(axis=1, keepdims=True)


def predictions_to_plain(model: PretrainedModel, sequence: str) -> dict[str, Any]:
    """Returns values for JSON: the distributions, and their entropies in nats."""
    p_L20 = predicted_distributions(model, sequence)
    entropy_L = -(p_L20 * np.log(np.maximum(p_L20, 1e-300))).sum(axis=1)
    return {
        "letters": STANDARD,
        "kind": "causal" if model.causal else "masked",
        "probabilities": p_L20.round(_DECIMALS).tolist(),
        "entropy": entropy_L.round(_DECIMALS).tolist(),
    }
