"""Secondary structure from coordinates, as labels of residues."""

from collections.abc import Sequence

import numpy as np

from protlm.analysis.dssp import secondary_structure
from protlm.analysis.structures import Structure
from protlm.downstream.labels import UNLABELED
from protlm.downstream.splits import Split
from protlm.downstream.tasks import Targets, Task, targets_of


def state_labels(structure: Structure) -> str:
    """Returns H, E or C for each residue (`dssp.py`), `?` where its backbone is not resolved."""
    is_proline = np.array([letter == "P" for letter in structure.sequence])
    states = secondary_structure(structure.backbone_L43, is_proline)
    is_resolved = np.isfinite(structure.backbone_L43.sum(axis=(1, 2))).tolist()
    pairs = zip(states, is_resolved, strict=True)
    return "".join(state if resolved else UNLABELED for state, resolved in pairs)


def state_targets(
    fit: Sequence[Structure], test: Sequence[Structure]
) -> tuple[list[str], Targets, Split]:
    """Returns the sequences of both, the states of their residues, and who is in the test."""
    both = [*fit, *test]
    targets = targets_of([state_labels(one) for one in both], Task.residue_classes)
    rows = np.arange(len(both))
    split = Split(rows[: len(fit)], rows[:0], rows[len(fit) :], rows)
    return [one.sequence for one in both], targets, split
