"""Secondary structure: DSSP's own assignments, ideal geometry, and what is not resolved."""

from pathlib import Path

import numpy as np
import pytest

from protlm.analysis.dssp import hydrogen_bonds, secondary_structure
from protlm.analysis.structures import read_structure
from protlm.system.paths import sample_dir
from tests.fixtures.commands import read_table

GOLDEN = [
    (row["structure"], row["dssp"])
    for row in read_table(Path(__file__).parent.parent / "data_files" / "dssp.tsv")
]
THREE_STATES = {"H": "H", "G": "H", "I": "H", "E": "E", "B": "E"}
# Bond lengths in ångström and angles in degrees of a peptide.
BONDS = {"N": 1.33, "CA": 1.46, "C": 1.52}
ANGLES = {"N": 116.2, "CA": 121.7, "C": 111.0}


def place(a: np.ndarray, b: np.ndarray, c: np.ndarray, bond: float, angle: float, torsion: float):
    """The atom d with these bond c-d, angle b-c-d and dihedral a-b-c-d (degrees)."""
    angle, torsion = np.radians(angle), np.radians(torsion)
    along = (c - b) / np.linalg.norm(c - b)
    normal = np.cross(b - a, along)
    normal /= np.linalg.norm(normal)
    side = np.cross(normal, along)
    return c + bond * (
        -np.cos(angle) * along + np.sin(angle) * (np.cos(torsion) * side + np.sin(torsion) * normal)
    )


def ideal(phi: float, psi: float, length: int) -> np.ndarray:
    """The backbone N, CA, C, O of a chain with the same angles everywhere."""
    atoms = [np.array([0.0, 0, 0]), np.array([1.46, 0, 0]), np.array([2.0, 1.42, 0])]
    for _ in range(length):
        for name, torsion in (("N", psi), ("CA", 180.0), ("C", phi)):
            atoms.append(place(*atoms[-3:], BONDS[name], ANGLES[name], torsion))
    backbone = np.array(atoms).reshape(-1, 3, 3)
    oxygen = [
        place(nitrogen, n, c, 1.23, 120.5, 180.0)
        for (n, c), nitrogen in zip(backbone[:-1, 1:], backbone[1:, 0], strict=True)
    ]
    return np.concatenate([backbone[:-1], np.array(oxygen)[:, None]], axis=1)


@pytest.mark.parametrize("name, dssp", GOLDEN)
def test_the_states_are_those_of_dssp(name: str, dssp: str) -> None:
    structure = read_structure(sample_dir() / "structures" / "test" / f"{name}.pdb.gz")
    found = secondary_structure(structure.backbone_L43, structure.sequence)
    expected = [THREE_STATES.get(state, "C") for state in dssp]
    agreement = np.mean([a == b for a, b in zip(found, expected, strict=True)])
    # 98.9 % over the 90,003 residues of 400 other chains. DSSP saw the whole chain: of the first
    # two, strands are paired with residues that the files lack.
    assert agreement > (0.9 if name in ("1fuk_A", "1suu_A") else 0.98)


@pytest.mark.parametrize(
    ("angles", "states"),
    [
        ((-57.8, -47.0), "C" + "H" * 18 + "C"),
        # An extended chain by itself is not a strand.
        ((-120.0, 115.0), "C" * 20),
        *(((-57.8, -47.0), "C" * length) for length in (1, 2, 3, 5)),
    ],
)
def test_ideal_chains_have_their_states(angles: tuple[float, float], states: str) -> None:
    backbone_L43, sequence = ideal(*angles, len(states)), "A" * len(states)
    assert secondary_structure(backbone_L43, sequence) == states
    if "H" in states:
        # Each C=O is bonded to the N-H four residues on, and to no other.
        bonds = np.argwhere(hydrogen_bonds(backbone_L43, sequence)).tolist()
        assert bonds == [[i, i + 4] for i in range(16)]


def test_a_proline_gives_no_bond() -> None:
    bond_LL = hydrogen_bonds(ideal(-57.8, -47.0, 20), "A" * 10 + "P" + "A" * 9)
    assert not bond_LL[:, 10].any()
    assert bond_LL.sum() == 15


def test_what_is_not_resolved_is_coil_and_breaks_the_chain() -> None:
    backbone_L43 = ideal(-57.8, -47.0, 30)
    backbone_L43[14:16] = np.nan
    states = secondary_structure(backbone_L43, "A" * 30)
    assert states[14:16] == "CC"
    # The helices end where their residues have no neighbor any more.
    assert states[1:13] == "H" * 12
    assert states[17:29] == "H" * 12


def test_no_bulge_is_filled_over_a_break_of_the_chain() -> None:
    structure = read_structure(sample_dir() / "structures" / "test" / "1ypq_B.pdb.gz")
    backbone_L43, no_proline = structure.backbone_L43.copy(), "A" * len(structure)
    assert secondary_structure(backbone_L43, no_proline)[66:73] == "EEEEEEE"
    # Bridges on both sides of the missing residue remain, as those of a bulge would.
    backbone_L43[69] = np.nan
    assert secondary_structure(backbone_L43, no_proline)[66:73] == "EECCCEE"
