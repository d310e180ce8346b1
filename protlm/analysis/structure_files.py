"""Models and sequences of PDB and mmCIF files; names, numbers and coordinates of atoms suffice."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, final

import numpy as np

from protlm.data.records.format_detection import foreign_structure, structure_format
from protlm.data.records.source import ByteSource
from protlm.system.errors import InputDataError

_MAX_BYTES = 1 << 27
_ATOMS = ("ATOM  ", "HETATM", "ANISOU")
# A peptide bond is 1.33 Å long; the next nearest C and N of a chain are over 3 Å apart.
_PEPTIDE_BOND_ANGSTROM = 2.0
# Without these atoms, neighbors are recognized by CA atoms, which are 3.8 Å apart.
_CA_ANGSTROM = 4.3
# Alternatives have their CA atoms nearer than two residues can be.
_SAME_PLACE_ANGSTROM = 2.0
_HYBRID_36 = re.compile(r"[A-Z][0-9A-Z]{3}|[a-z][0-9a-z]{3}")
_DECIMAL = re.compile(r"-?(?:\d+\.?\d*|\.\d+)")
# Columns of mmCIF that may be missing, and what is taken for them.
_OPTIONAL = {
    "pdbx_PDB_ins_code": " ",
    "label_alt_id": " ",
    "occupancy": "1",
    "group_PDB": "",
    "pdbx_PDB_model_num": "1",
    "label_asym_id": "",
    "label_entity_id": "",
}
# The atoms of the side chain after CB, and the names, of protonation states and disulfide bonds in
# AMBER, CHARMM, GROMOS and OPLS. HSE and GLH are also ligands of the PDB, with other atoms.
_FORCE_FIELDS = {
    "H": ("CG ND1 CD2 CE1 NE2", "HSD HSE HSP HID HIE HIP HIM HISA HISB HISD HISE HISH"),
    "C": ("SG", "CYX CYM CYN CYZ CYS1 CYS2 CYSH"),
    "D": ("CG OD1 OD2", "ASH ASPH ASPP"),
    "E": ("CG CD OE1 OE2", "GLH GLUH GLUP"),
    "K": ("CG CD CE NZ", "LYN LSN LYSH"),
    "R": ("CG CD NE CZ NH1 NH2", "ARN ARGN"),
}
_NOT_SIDE_CHAIN = {"N", "CA", "CB", "C", "O", "OXT", "OT1", "OT2", "OC1", "OC2", "O1", "O2"}
# What Biopython's table of modified residues lacks: names and letters, of D-amino acids too.
_FURTHER = (
    "SECU PYLO ASXB GLXZ DALA DARR DSGN DASD DCYC DGNQ DGLE DHIH DILI DLEL DLYK MEDM DPNF DPRP "
    "DSNS DTHT DTRW DTYY DVAV"
)


@final
@dataclass(eq=False)
class Residue:
    """A residue of a file, whether amino acid or not.

    `sites` has the coordinates of all atoms by their names and alternatives, `atoms` those of the
    most occupied alternative, the first if equal, and `occupancies` its occupancy. `options` are
    the names of the residues at this position, if it was chosen among them.
    """

    name: str
    number: int
    insertion: str
    is_ligand: bool
    sites: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)
    atoms: dict[str, np.ndarray] = field(default_factory=dict)
    occupancies: dict[str, float] = field(default_factory=dict)
    options: tuple[str, ...] = ()


@cache
def residue_letters() -> dict[str, str]:
    """Returns the letter of each name of the PDB; of modified residues that of the parent."""
    from Bio.Data.PDBData import protein_letters_3to1_extended

    return protein_letters_3to1_extended | {x[:3]: x[3] for x in _FURTHER.split()}


def letter_of(residue: Residue) -> str:
    """Returns the letter of a residue, by its name in the PDB, or those of force fields."""
    of_pdb = residue_letters().get(residue.name)
    heavy = {name for name in residue.atoms if name.lstrip("123")[:1] not in ("H", "D")}
    for letter, (atoms, names) in _FORCE_FIELDS.items():
        if residue.name in names.split():
            expected, found = set(atoms.split()), heavy - _NOT_SIDE_CHAIN
            # An incomplete side chain does not decide; ligands are marked as heteroatoms.
            is_sure = found == expected or of_pdb is None or not residue.is_ligand
            if found <= expected and is_sure:
                return letter
    return of_pdb or "X"


def read_model(path: Path) -> tuple[dict[str, list[Residue]], dict[str, list[str]], list[str]]:
    """Reads the chains of the first model, the names in their sequences, and notes for the user.

    In mmCIF chains are those of `auth_asym_id`, and numbers of `label_seq_id`, where they exist.
    """
    with ByteSource(path, "a structure") as source:
        contents = bytearray()
        for block in source.blocks():
            contents += block
            if len(contents) > _MAX_BYTES:
                raise InputDataError(
                    f"{path} has more than {_MAX_BYTES >> 20} MB of text; give the chain alone"
                )
    is_mmcif = structure_format(contents) == "mmCIF"
    text = io.StringIO(contents.decode("utf-8", errors="replace"), newline=None)
    try:
        rows, sequences = (_read_mmcif if is_mmcif else _read_pdb)(text)
        if not rows:
            raise ValueError("it has no atoms" if contents.strip() else "it is empty")
        chains, repeated = _chains(rows)
    except (ValueError, LookupError, TypeError) as error:
        what = f"it cannot be read as {'an mmCIF' if is_mmcif else 'a PDB'} file ({error})"
        why = what if is_mmcif else foreign_structure(contents) or what
        raise InputDataError(
            f"{path}: {why}; give a complete PDB or mmCIF file, plain or gzip"
        ) from error
    notes = [f"{repeated:,} atoms are there twice, the first is used"] if repeated else []
    return chains, sequences, notes


def _chains(rows: Sequence[Sequence[str]]) -> tuple[dict[str, list[Residue]], int]:
    """Returns the residues of each chain, in order, and the number of repeated atoms.

    Residues of one number are several if their names differ, or if their atoms come again. Other
    atoms may follow later, as hydrogens that a program added at the end of the chain.
    """
    chains, last, repeated = dict[str, list[Residue]](), None, 0
    known: dict[tuple[str, int, str, str], Residue] = {}
    for chain, name, group, number, insertion, atom, alternative, occupancy, *xyz in rows:
        try:
            place, coordinates = (chain, _number(number), insertion), np.array(xyz, dtype="f")
        except ValueError:
            raise ValueError(
                f"the atom {atom} of {name} {number.strip()} of chain {chain} lacks the number of "
                "its residue, or x, y or z"
            ) from None
        key, residue = (atom, alternative), known.get((*place, name))
        if residue is None or _starts_again(residue, key, coordinates, is_apart=place != last):
            residue = Residue(name, *place[1:], is_ligand=group == "HETATM")
            known[*place, name] = residue
            chains.setdefault(chain, []).append(residue)
        last = place
        if key in residue.sites:
            repeated += 1
            continue
        residue.sites[key] = coordinates
        # Other programs write other numbers there, or no number.
        occupied = float(occupancy) if _DECIMAL.fullmatch(occupancy) else 1.0
        if occupied > residue.occupancies.get(atom, -np.inf):
            residue.occupancies[atom], residue.atoms[atom] = occupied, coordinates
    return chains, repeated


def _number(text: str) -> int:
    """Returns the number of a residue; in hybrid-36, A000 is 10,000, and a000 follows ZZZZ.

    >>> [_number(text) for text in ("9999", "A000", "ZZZZ", "a000")]
    [9999, 10000, 1223055, 1223056]
    """
    if not _HYBRID_36.fullmatch(text):
        return int(text)
    return int(text, 36) - 10 * 36**3 + 10_000 + 26 * 36**3 * text[0].islower()


def _starts_again(
    residue: Residue, key: tuple[str, str], coordinates: np.ndarray, *, is_apart: bool
) -> bool:
    """Returns whether an atom is of another residue, of the same number and name as this one."""
    if is_apart:
        return key in residue.sites
    first, place = next(iter(residue.sites.items()))
    return key == first and not np.array_equal(place, coordinates)


def _read_pdb(text: io.StringIO) -> tuple[list[list[str]], dict[str, list[str]]]:
    sequences: dict[str, list[str]] = {}
    shortest, line, rows = 80, "\n", list[list[str]]()
    for line in text:
        if line.startswith("SEQRES"):
            sequences.setdefault(line[11:12], []).extend(line[19:70].split())
        elif line.startswith(_ATOMS) and line.endswith("\n"):
            shortest = min(shortest, len(line.rstrip()))
    columns = 54 if line.endswith("\n") else shortest
    if any(x.startswith(line[:6]) for x in _ATOMS) and len(line.rstrip()) < columns:
        raise ValueError("its last line ends within an atom")
    text.seek(0)
    for line in text:
        if line.startswith(("MODEL", "ENDMDL")) and rows:
            break
        if line.startswith(_ATOMS[:2]):
            name, atom, occupancy = (line[a:b].strip() for a, b in ((17, 20), (12, 16), (54, 60)))
            kind, xyz = line[:6], [line[30:38], line[38:46], line[46:54]]
            where = [line[21:22], name, kind, line[22:26], line[26:27]]
            rows.append([*where, atom, line[16:17], occupancy, *xyz])
    return rows, sequences


def _read_mmcif(text: io.StringIO) -> tuple[list[list[str]], dict[str, list[str]]]:
    from Bio.PDB.MMCIF2Dict import MMCIF2Dict

    values: dict[str, Any] = MMCIF2Dict(text)

    def column(*tags: str, default: str | None = None) -> list[str]:
        """Returns in each row the value of the first tag that has one."""
        present = [values[f"_atom_site.{tag}"] for tag in tags if f"_atom_site.{tag}" in values]
        if not present and default is None:
            raise ValueError(f"there is no _atom_site.{' or '.join(tags)}")
        rows = zip(*present, strict=False) if present else [()] * len(columns[0])
        return [next((x for x in row if x not in ("?", ".")), default or "") for row in rows]

    columns = [column(f"Cartn_{axis}") for axis in "xyz"]
    columns += [column("auth_asym_id", "label_asym_id")]
    columns += [column(f"label_{tag}", f"auth_{tag}") for tag in ("atom_id", "comp_id", "seq_id")]
    columns += [column(tag, default=default) for tag, default in _OPTIONAL.items()]
    if len({len(column) for column in columns}) > 1:
        raise ValueError("an atom lacks columns")
    rows, sequences, stated = list[list[str]](), {}, _stated(values)
    for row in zip(*columns, strict=True):
        chain, atom, name, number, insertion, alternative, occupancy, group, model = row[3:12]
        is_ligand = group == "HETATM" if group else name not in residue_letters()
        # Waters may have no number; models follow each other.
        if model != columns[11][0] or (is_ligand and not number):
            continue
        of_chain = stated.get(("asym_id", row[12])) or stated.get(("entity_id", row[13]))
        if of_chain and name in of_chain:
            is_ligand = False
            sequences.setdefault(chain, of_chain)
        where = [chain, name, "HETATM" if is_ligand else "ATOM", number, insertion]
        rows.append([*where, atom, alternative, occupancy, *row[:3]])
    return rows, sequences


def _stated(values: dict[str, Any]) -> dict[tuple[str, str], list[str]]:
    """Returns the names of the residues of each chain and entity, the first of alternatives."""
    found: dict[tuple[str, str], dict[int, str]] = {}
    for category, owner, number in (
        ("_pdbx_poly_seq_scheme", "asym_id", "seq_id"),
        ("_entity_poly_seq", "entity_id", "num"),
    ):
        columns = (values.get(f"{category}.{tag}", []) for tag in (owner, number, "mon_id"))
        for one, place, name in zip(*columns, strict=False):
            found.setdefault((owner, one), {}).setdefault(int(place), name)
    return {owner: [names[key] for key in sorted(names)] for owner, names in found.items()}


def are_alternatives(first: Residue, other: Residue, *, is_in_chain: bool) -> bool:
    """Returns whether residues of one number are the same, marked as alternatives, or overlap.

    Of those that are marked, one that is neither in the chain nor there is a ligand of its own.
    """
    is_marked = all(alternative.strip() for _, alternative in other.sites)
    is_near = _distance(first, "CA", other, "CA") < _SAME_PLACE_ANGSTROM
    if is_marked:
        return is_in_chain or is_near
    return first is other or (is_near and first.name != other.name)


def is_bonded(before: Residue | None, after: Residue | None) -> bool:
    """Returns whether two residues are neighbors in the chain."""
    if before is None or after is None:
        return False
    if "C" in before.atoms and "N" in after.atoms:
        return _distance(before, "C", after, "N") < _PEPTIDE_BOND_ANGSTROM
    return _distance(before, "CA", after, "CA") < _CA_ANGSTROM


def _distance(one: Residue, atom: str, other: Residue, of_other: str) -> float:
    """Returns the distance of two atoms in ångström, infinity if one is missing."""
    if atom not in one.atoms or of_other not in other.atoms:
        return np.inf
    return float(np.linalg.norm(one.atoms[atom] - other.atoms[of_other]))


def places_in(stated: str, residues: Sequence[Residue]) -> list[int] | None:
    """Returns the place of each residue in a sequence, from 0, by letters; None if there is none.

    Bonded residues have consecutive places. If there are several ways, the numbering decides: of
    the whole chain, then of all gaps, of as many gaps as possible, or not at all.
    """
    letters = residue_letters()
    options = [
        {letter_of(one), *(letters.get(name, "X") for name in one.options or [one.name])}
        for one in residues
    ]
    pairs = zip([None, *residues], residues, strict=False)
    starts = [place for place, pair in enumerate(pairs) if not is_bonded(*pair)]
    gaps, parts = [f".{{{max(residues[0].number - 1, 0)}}}"], []
    for start, end in zip(starts, [*starts[1:], len(residues)], strict=True):
        parts.append("(" + "".join(f"[{''.join(one)}]" for one in options[start:end]) + ")")
        if start:
            skipped = residues[start].number - residues[start - 1].number - 1
            gaps.append(f".{{{max(skipped, 0)}}}")
    exact = "".join(map("".join, zip(["", *gaps[1:]], parts, strict=True)))
    # Atomic groups take the first place of each part, so that the search is no longer than that.
    near = "".join(f"(?>(?:{gap}|.*?){part})" for gap, part in zip(gaps, parts, strict=True))
    far = "".join(f"(?>.*?{part})" for part in parts)
    for pattern in (f"^{gaps[0]}{exact}", exact, f"^{near}", f"^{far}"):
        if found := re.search(pattern, stated):
            return [place for part in range(len(parts)) for place in range(*found.span(part + 1))]
    return None
