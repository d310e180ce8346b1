"""Residues of one number, caps, and files of atoms that are not read."""

from pathlib import Path

import numpy as np
import pytest

from protlm.analysis.structures import read_chain, read_structure
from protlm.data.records import Tally, read_records
from protlm.system.errors import InputDataError
from tests.analysis.test_structures import (
    ATOMS,
    BCIF,
    CAPSID,
    DATA,
    FIRST,
    MMTF,
    SEQRES,
    number,
    read,
    renumbered,
    write,
)

WHOLE_CB = read_structure(DATA / "1A8O.pdb.gz").cb_L3


def as_mmcif(lines: list[str]) -> str:
    tags = "group_PDB label_atom_id label_alt_id label_comp_id auth_asym_id label_seq_id Cartn_x"
    tags += " Cartn_y Cartn_z occupancy"
    columns = (0, 6), (12, 16), (16, 17), (17, 20), (21, 22), (22, 26), (30, 38), (38, 46), (46, 54)
    values = ([line[a:b].strip() or "." for a, b in (*columns, (54, 60))] for line in lines)
    rows = "\n".join(" ".join(f'"{x}"' for x in row) for row in values)
    return "data_x\nloop_\n" + "\n".join(f"_atom_site.{x}" for x in tags.split()) + f"\n{rows}\n#\n"


# Kinds, marks, names and occupancies of residues at one position, and which is used.
ALTERNATIVES = {
    "one is modified": ("ATOM   APHE 0.70", "HETATM BSEP 0.30", 0),
    "the modified one": ("ATOM   APHE 0.30", "HETATM BSEP 0.70", 1),
    "two are modified": ("HETATM AMSE 0.40", "HETATM BSEP 0.60", 1),
    "equal": ("HETATM AMSE 0.50", "HETATM BSEP 0.50", 0),
    "never there": ("ATOM   APHE 0.00", "ATOM   BLEU 0.00", 0),
    "not marked": ("HETATM  MSE 0.40", "ATOM    MET 0.60", 1),
    "one is marked": ("ATOM    PHE 0.40", "ATOM   BLEU 0.60", 1),
    "unknown occupancy": ("ATOM   APHE     ", "ATOM   BLEU 0.60", 0),
    "one residue": ("ATOM   APHE 0.40", "ATOM   BPHE 0.60", 1),
}


@pytest.mark.parametrize("case", ALTERNATIVES)
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("suffix", ["pdb", "cif"])
def test_one_of_alternative_residues_is_kept(
    case: str, is_interleaved: bool, suffix: str, tmp_path: Path
) -> None:
    *given, used = ALTERNATIVES[case]
    at = FIRST + CAPSID.index("F")
    before, here, after = (
        [x for x in ATOMS if np.sign(number(x) - at) == sign and number(x) > 155]
        for sign in (-1, 0, 1)
    )
    both = [
        f"{kind[:6]}{x[6:16]}{kind[7:11]}{x[20:30]}{float(x[30:38]) + 0.5 * i:8.3f}{x[38:55]}"
        f"{kind[12:]:>5s}{x[60:]}"
        for i, kind in enumerate(given)
        for x in here
    ]
    if is_interleaved:
        both = [x for pair in zip(both[: len(here)], both[len(here) :], strict=True) for x in pair]
    lines = [*before, *both, *after]
    name, letters = given[used][8:11], {"PHE": "F", "LEU": "L", "SEP": "S", "MSE": "M", "MET": "M"}
    expected = CAPSID.replace("F", letters[name], 1)
    found = read(tmp_path / f"a.{suffix}", lines if suffix == "pdb" else as_mmcif(lines))
    assert found.sequence == expected[5:]
    plain = read_structure(DATA / "1A8O.pdb.gz").cb_L3[at - FIRST]
    np.testing.assert_allclose(
        found.cb_L3[at - 156], plain + np.array([0.5 * used, 0, 0]), atol=1e-3
    )
    note = f"chain A: of alternative residues the most occupied is used: {at} {name}"
    assert found.notes == (() if case == "one residue" else (note,))
    # The sequence that the file states has the first of them.
    stated = "\n".join(SEQRES).replace("PHE", given[0][8:11], 1).splitlines()
    assert read(tmp_path / "whole.pdb", [*stated, *lines]).sequence == expected


# Lines of a chain, the sequence, and how many residues are left out.
HALF = [x for x in ATOMS if number(x) < 161]
WATERS = [f"{x[:17]}SOL{x[20:]}" for x in ATOMS if x[12:16] == " O  "]
LATER = [f"{x[:16]}B{x[17:55]} 0.40{x[60:]}" for x in HALF]
# All atoms of the first residue but one, as of a program that adds what is missing at the end.
ADDED = [x for x in ATOMS if number(x) == FIRST and x[12:16] != " N  "]
# A free amino acid, far away, that has alternatives and the number of a residue.
RARE = [f"{x[:55]} 0.20{x[60:]}" if number(x) == FIRST + 2 else x for x in ATOMS]
LIGAND = [f"HETATM{x[6:16]}AGLU{x[20:46]} 999.000{x[54:]}" for x in RARE if number(x) == FIRST + 2]
RESTARTS = {
    "a second chain": ([*ATOMS, "TER", *HALF], CAPSID, 10),
    "frames": ([*HALF, "END", *HALF, "END", *HALF], CAPSID[:10], 20),
    "other residues": (
        [*HALF, *(f"{x[:17]}TRP{x[20:46]}  99.000{x[54:]}" for x in HALF)],
        CAPSID[:10],
        10,
    ),
    "no insertion code": ([renumbered(x, -(number(x) == 160)) for x in HALF], CAPSID[:9], 1),
    "waters": ([*ATOMS, *WATERS], CAPSID, 0),
    "alternatives later": ([*ATOMS, *LATER], CAPSID, 0),
    "atoms later": ([*(x for x in ATOMS if x not in ADDED), *ADDED], CAPSID, 0),
    "a ligand": ([*RARE, *LIGAND], CAPSID, 0),
    "hybrid-36": ([*ATOMS, *(f"{x[:22]}A000{x[26:]}" for x in WATERS[:1])], CAPSID, 0),
}


@pytest.mark.parametrize(("lines", "sequence", "left_out"), RESTARTS.values(), ids=RESTARTS)
def test_numbers_that_restart_are_counted(
    lines: list[str], sequence: str, left_out: int, tmp_path: Path
) -> None:
    for suffix in ("pdb", "cif"):
        atoms = [x for x in lines if x[:4] in ("ATOM", "HETA")]
        found = read(tmp_path / f"a.{suffix}", lines if suffix == "pdb" else as_mmcif(atoms))
        assert found.sequence == sequence
        note = f"residues left out, whose numbers were there before: {left_out}; give each"
        assert [note in x for x in found.notes] == [True] * (left_out > 0)
        np.testing.assert_array_equal(found.cb_L3, WHOLE_CB[: len(sequence)])


def test_caps_are_left_out(tmp_path: Path) -> None:
    ends = [f"ATOM  {x[6:17]}{{}}{x[20:]}" for x in ATOMS if number(x) in (151, 220)]
    lines = [x for x in ATOMS if 151 < number(x) < 220]
    for cap in ("ACE", "FOR", "NH2", "NMA", "NME"):
        capped = [x.format(cap) for x in ends if x[12:16] in (" CA ", " C  ")]
        of_chain = [x.replace("MSE", cap, 1) for x in SEQRES[:1]] + SEQRES[1:]
        for head in ([], of_chain):
            found = read(tmp_path / "a.pdb", [*head, *capped[:2], *lines, *capped[2:]])
            assert found.sequence == (CAPSID[1:] if head else CAPSID[1:-1])


@pytest.mark.parametrize(
    ("data", "message"),
    [("BCIF", "BinaryCIF"), ("MMTF", "MMTF"), ("MOL2", "MOL2"), ("GRO", "'Pro")],
)
def test_other_files_of_atoms_are_named_with_what_is_read(
    data: str, message: str, tmp_path: Path
) -> None:
    others = {
        "BCIF": BCIF,
        "MMTF": MMTF,
        "MOL2": b"@<TRIPOS>MOLECULE\nx\n",
        "GRO": b"Protein\n 1\n",
    }
    path = write(tmp_path / "a.x", others[data])
    assert read_chain(path, None) is None
    with pytest.raises(InputDataError, match=rf"{message}.*inspect read structures.*PDB, mmCIF"):
        next(read_records(path, Tally()))
