"""The protein of a page: its sequence, and its structure if one is known."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np

from protlm.analysis.dssp import secondary_structure
from protlm.analysis.structures import Structure, contact_map

_SHORTEST_CONTACT = 3
_LONGEST_TEXT = 5_000


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
            "identifier": _shortened(self.identifier),
            "header": _shortened(self.header),
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


def _shortened(text: str) -> str:
    """Cuts a text that would take more room than the page has for it."""
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[:_LONGEST_TEXT]} … ({len(text):,} characters)"


def _coordinates(atoms_L3: np.ndarray) -> list[list[float] | None]:
    """Returns coordinates to 0.01 Å; None where an atom is missing."""
    return [
        None if np.isnan(atom_3).any() else [round(float(x), 2) for x in atom_3]
        for atom_3 in atoms_L3
    ]
