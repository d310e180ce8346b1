"""Three-state secondary structure from backbone coordinates.

Kabsch and Sander 1983 (doi:10.1002/bip.360221211): helices (α, 3₁₀ and π), strands with their
bulges, and coil, which includes bends and turns.
"""

import numpy as np

HELIX, STRAND, COIL = "H", "E", "C"
STATES = HELIX + STRAND + COIL

# Charges of 0.42 e and 0.20 e, in kcal/mol and ångström.
_COUPLING, _LARGEST_ENERGY = 27.9, -0.5
_NH_ANGSTROM = 1.01
_LONGEST_PEPTIDE_BOND = 2.5
# The smallest separation of bridged residues.
_MIN_BRIDGE = 3


def secondary_structure(backbone_L43: np.ndarray, sequence: str) -> str:
    """Returns the state of each residue, a string of `STATES`; unresolved residues are C.

    The backbone has the coordinates of N, CA, C and O in ångström, NaN where unresolved. Prolines
    of the sequence donate no hydrogen.
    """
    length = len(backbone_L43)
    bond_LL = hydrogen_bonds(backbone_L43, sequence)
    linked_L = np.append(_is_linked(backbone_L43), False)
    states = np.full(length, COIL)
    states[_in_strands(*_bridges(bond_LL, linked_L), linked_L)] = STRAND
    for start in _helix_starts(bond_LL, linked_L, 4):
        states[start : start + 4] = HELIX
    # α-helices take precedence over strands, and both over the other helices.
    for turn in (3, 5):
        taken = states != COIL
        for start in _helix_starts(bond_LL, linked_L, turn):
            if not taken[start : start + turn].any():
                states[start : start + turn] = HELIX
    return "".join(states)


def hydrogen_bonds(backbone_L43: np.ndarray, sequence: str) -> np.ndarray:
    """Finds bonds of C=O (row) and N-H (column), with an energy below -0.5 kcal/mol, bool LL."""
    n_L3, _, c_L3, o_L3 = np.moveaxis(backbone_L43, 1, 0)
    length = len(backbone_L43)
    h_L3 = np.full((length, 3), np.nan)
    carbonyl_L3 = c_L3[:-1] - o_L3[:-1]
    carbonyl_L3 = carbonyl_L3 / np.linalg.norm(carbonyl_L3, axis=-1, keepdims=True)
    is_proline_L = np.array([letter == "P" for letter in sequence])
    gives_L = _is_linked(backbone_L43) & ~is_proline_L[1:]
    h_L3[1:][gives_L] = (n_L3[1:] + _NH_ANGSTROM * carbonyl_L3)[gives_L]

    def inverse(a_L3: np.ndarray, b_L3: np.ndarray) -> np.ndarray:
        return 1 / np.maximum(np.linalg.norm(a_L3[:, None] - b_L3[None], axis=-1), 0.5)

    energy_LL = _COUPLING * (
        inverse(o_L3, n_L3) + inverse(c_L3, h_L3) - inverse(o_L3, h_L3) - inverse(c_L3, n_L3)
    )
    own = np.abs(np.subtract.outer(np.arange(length), np.arange(length))) < 2
    # Comparisons with NaN are false: unresolved atoms have no bonds.
    return (energy_LL < _LARGEST_ENERGY) & ~own


def _is_linked(backbone_L43: np.ndarray) -> np.ndarray:
    distance_L = np.linalg.norm(backbone_L43[:-1, 2] - backbone_L43[1:, 0], axis=-1)
    return distance_L < _LONGEST_PEPTIDE_BOND


def _helix_starts(bond_LL: np.ndarray, linked_L: np.ndarray, turn: int) -> list[int]:
    """Returns where `turn` helical residues begin: after two consecutive turns."""
    length = len(bond_LL)
    turns = [
        bool(bond_LL[i, i + turn]) and bool(linked_L[i : i + turn].all())
        for i in range(max(length - turn, 0))
    ]
    return [i for i in range(1, len(turns)) if turns[i - 1] and turns[i]]


def _bridges(bond_LL: np.ndarray, linked_L: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Finds parallel and antiparallel bridges, bool LL each, both symmetric."""
    length = len(bond_LL)
    padded = np.zeros((length + 2, length + 2), dtype=bool)
    padded[1:-1, 1:-1] = bond_LL

    def at(i: int, j: int) -> np.ndarray:
        """Returns whether C=O of a + i and N-H of b + j are bonded, for all residues a, b."""
        return padded[1 + i : length + 1 + i, 1 + j : length + 1 + j]

    # C=O of a - 1 with N-H of b, and C=O of b with N-H of a + 1.
    forward = at(-1, 0) & at(0, 1).T
    antiparallel = (at(0, 0) & at(0, 0).T) | (at(-1, 1) & at(-1, 1).T)
    has_both = np.concatenate(([False], linked_L[:-1])) & linked_L
    apart = np.abs(np.subtract.outer(np.arange(length), np.arange(length))) >= _MIN_BRIDGE
    allowed = has_both[:, None] & has_both[None] & apart
    return (forward | forward.T) & allowed, antiparallel & allowed


def _in_strands(
    parallel_LL: np.ndarray, antiparallel_LL: np.ndarray, linked_L: np.ndarray
) -> np.ndarray:
    """Returns bridged residues and those in a bulge between two bridges of one kind, bool [L].

    A bulge has at most one extra residue on one strand and four on the other, and
    no break of the chain.
    """
    part_L = np.concatenate(([0], np.cumsum(~linked_L[:-1])))
    in_strand = np.asarray((parallel_LL | antiparallel_LL).any(axis=1))
    for bridge_LL, sign in ((parallel_LL, 1), (antiparallel_LL, -1)):
        pairs = np.argwhere(np.triu(bridge_LL))
        for i, j in pairs:
            steps = (pairs - (i, j)) * (1, sign)
            short, long = steps.min(axis=1), steps.max(axis=1)
            is_whole = (part_L[pairs] == part_L[[i, j]]).all(axis=1)
            for i2, j2 in pairs[(short >= 1) & (short <= 2) & (long <= 5) & is_whole]:
                in_strand[i : i2 + 1] = True
                in_strand[min(j, j2) : max(j, j2) + 1] = True
    return in_strand
