"""Hidden states of residues, and their secondary structure as labels of a probe."""

from collections.abc import Sequence

import numpy as np

from protlm.analysis.dssp import STATES, secondary_structure
from protlm.analysis.probes import Examples
from protlm.analysis.structures import Structure
from protlm.model.pretrained import PretrainedModel


def resolved(structure: Structure) -> np.ndarray:
    """Returns whether the backbone of each residue is resolved, bool [L]."""
    return np.asarray(~np.isnan(structure.backbone_L43).any(axis=(1, 2)))


def state_labels(structures: list[Structure]) -> np.ndarray:
    """Returns the states of all resolved residues, int64."""
    labels = []
    for structure in structures:
        is_proline = np.array([letter == "P" for letter in structure.sequence])
        states = secondary_structure(structure.backbone_L43, is_proline)
        numbers = np.array([STATES.index(state) for state in states])
        labels.append(numbers[resolved(structure)])
    return np.concatenate(labels)


def groups(structures: list[Structure]) -> np.ndarray:
    """Returns the index of the structure of each resolved residue, int64."""
    counts = [int(resolved(structure).sum()) for structure in structures]
    return np.repeat(np.arange(len(structures)), counts)


def residue_examples(structures: list[Structure], features: list[np.ndarray]) -> Examples:
    """Returns the states of the resolved residues of structures, with their features."""
    return Examples(features, state_labels(structures), groups(structures))


def residue_embeddings(
    model: PretrainedModel, structures: list[Structure], layers: Sequence[int] | None = None
) -> list[np.ndarray]:
    """Returns hidden states of the resolved residues by layer, float32 [residues, D]."""
    layers = range(model.num_layers + 1) if layers is None else layers
    parts: list[list[np.ndarray]] = [[] for _ in layers]
    for structure in structures:
        out = model(model.tokenize([structure.sequence]), layers=list(layers))
        for part, layer in zip(parts, layers, strict=True):
            hidden_LD = out.hidden[layer][0, 1:-1].float().cpu().numpy()
            part.append(hidden_LD[resolved(structure)])
    return [np.concatenate(part) for part in parts]
