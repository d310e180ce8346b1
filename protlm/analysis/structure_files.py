"""Models and sequences of PDB and mmCIF files; names, numbers and coordinates of atoms suffice."""

import io
import re
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from protlm.data.records.format_detection import structure_format
from protlm.data.records.source import ByteSource
from protlm.system.errors import InputDataError

if TYPE_CHECKING:
    from Bio.PDB.Model import Model
    from Bio.PDB.Residue import Residue

_MAX_BYTES = 1 << 27
_ATOMS = ("ATOM  ", "HETATM", "ANISOU")
# A peptide bond is 1.33 Å long; the next nearest C and N of a chain are over 3 Å apart.
_PEPTIDE_BOND_ANGSTROM = 2.0
# Without these atoms, neighbors are recognized by CA atoms, which are 3.8 Å apart.
_CA_ANGSTROM = 4.3
# Columns of mmCIF that may be missing, and what is taken for them.
_OPTIONAL = {"pdbx_PDB_ins_code": " ", "label_alt_id": " ", "occupancy": "1", "group_PDB": ""}
_OPTIONAL |= {"pdbx_PDB_model_num": "1", "label_asym_id": "", "label_entity_id": ""}
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


@cache
def residue_letters() -> dict[str, str]:
    """Returns the letter of each name of the PDB; of modified residues that of the parent."""
    from Bio.Data.PDBData import protein_letters_3to1_extended

    return protein_letters_3to1_extended | {x[:3]: x[3] for x in _FURTHER.split()}


def letter_of(residue: "Residue") -> str:
    """Returns the letter of a residue, by its name in the PDB, or those of force fields."""
    of_pdb = residue_letters().get(residue.resname)
    heavy = {name for name in residue.child_dict if name.lstrip("123")[:1] not in ("H", "D")}
    for letter, (atoms, names) in _FORCE_FIELDS.items():
        if residue.resname in names.split():
            expected, found = set(atoms.split()), heavy - _NOT_SIDE_CHAIN
            # An incomplete side chain does not decide; ligands are marked as heteroatoms.
            is_sure = found == expected or of_pdb is None or residue.id[0] == " "
            if found <= expected and is_sure:
                return letter
    return of_pdb or "X"


def read_model(path: Path) -> "tuple[Model, dict[str, list[str]], list[str]]":
    """Reads the first model, the names in the sequence of each chain, and notes for the user.

    In mmCIF chains are those of `auth_asym_id`, and numbers of `label_seq_id`, where they exist.
    """
    from Bio.PDB.PDBExceptions import PDBConstructionException

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
    lost = ("defined twice", "Blank altlocs in duplicate")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model, sequences = (_read_mmcif if is_mmcif else _read_pdb)(text)
        count = sum(any(word in str(one.message) for word in lost) for one in caught)
        if count and all(len({residue.id[1] for residue in chain}) < 2 for chain in model):
            raise ValueError("all residues have one number, so that atoms are defined twice")
    except StopIteration:
        raise InputDataError(f"{path} has no atoms; give a complete PDB or mmCIF file") from None
    except (ValueError, LookupError, TypeError, PDBConstructionException) as error:
        kind = "an mmCIF" if is_mmcif else "a PDB"
        is_lost = any(word in str(error) for word in lost)
        advice = "give each residue of a chain its own number" if is_lost else "give a complete one"
        message = f"{path} cannot be read as {kind} file ({error}); {advice}"
        raise InputDataError(message) from error
    note = "atoms or residues are there twice, the first is used; name chains differently"
    return model, sequences, [f"{count:,} {note}"] if count else []


def _read_pdb(text: io.StringIO) -> "tuple[Model, dict[str, list[str]]]":
    from Bio.PDB.PDBParser import PDBParser

    sequences: dict[str, list[str]] = {}
    shortest, line = 80, "\n"
    for line in text:
        if line.startswith("SEQRES"):
            sequences.setdefault(line[11:12], []).extend(line[19:70].split())
        elif line.startswith(_ATOMS) and line.endswith("\n"):
            shortest = min(shortest, len(line.rstrip()))
    columns = 54 if line.endswith("\n") else shortest
    if any(x.startswith(line[:6]) for x in _ATOMS) and len(line.rstrip()) < columns:
        raise ValueError("its last line ends within an atom")
    text.seek(0)
    structure: Any = PDBParser().get_structure("", text)
    return next(structure.get_models()), sequences


def _read_mmcif(text: io.StringIO) -> "tuple[Model, dict[str, list[str]]]":
    from Bio.PDB.MMCIF2Dict import MMCIF2Dict
    from Bio.PDB.StructureBuilder import StructureBuilder

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
    builder, last, sequences, stated = StructureBuilder(), None, {}, _stated(values)
    builder.init_structure("")
    builder.init_model(0)
    builder.init_seg(" ")
    for row in zip(*columns, strict=True):
        chain, atom, name, number, insertion, alternative, occupancy, group, model = row[3:12]
        is_ligand = group == "HETATM" if group else name not in residue_letters()
        # Waters may have no number; models follow each other.
        if model != columns[11][0] or (is_ligand and not number):
            continue
        if last is None or chain != last[0]:
            builder.init_chain(chain)
        of_chain = stated.get(("asym_id", row[12])) or stated.get(("entity_id", row[13]))
        if of_chain and name in of_chain:
            is_ligand = False
            sequences.setdefault(chain, of_chain)
        key = (chain, name, "H" if is_ligand else " ", int(number), insertion)
        if key != last:
            builder.init_residue(*key[1:])
            last = key
        xyz, share = np.array(row[:3], dtype="f"), float(occupancy)
        builder.init_atom(atom, xyz, 0.0, share, alternative, atom, element=atom[:1])
    return builder.get_structure()[0], sequences  # pyright: ignore[reportOptionalSubscript]


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


def is_bonded(before: "Residue | None", after: "Residue | None") -> bool:
    """Returns whether two residues are neighbors in the chain."""
    if before is None or after is None:
        return False
    if "C" in before and "N" in after:
        return bool(before["C"] - after["N"] < _PEPTIDE_BOND_ANGSTROM)
    return "CA" in before and "CA" in after and bool(before["CA"] - after["CA"] < _CA_ANGSTROM)


def places_in(stated: str, residues: "Sequence[Residue]") -> list[int] | None:
    """Returns the place of each residue in a sequence, from 0, by letters; None if there is none.

    Bonded residues have consecutive places. If there are several ways, the numbering decides: of
    the whole chain, then of all gaps, of as many gaps as possible, or not at all.
    """
    options, letters = [], residue_letters()
    for residue in residues:
        names = residue.xtra.get("names", [residue.resname])
        options.append({letter_of(residue), *(letters.get(name, "X") for name in names)})
    pairs = zip([None, *residues], residues, strict=False)
    starts = [place for place, pair in enumerate(pairs) if not is_bonded(*pair)]
    gaps, parts = [f".{{{max(residues[0].id[1] - 1, 0)}}}"], []
    for start, end in zip(starts, [*starts[1:], len(residues)], strict=True):
        parts.append("(" + "".join(f"[{''.join(one)}]" for one in options[start:end]) + ")")
        if start:
            skipped = residues[start].id[1] - residues[start - 1].id[1] - 1
            gaps.append(f".{{{max(skipped, 0)}}}")
    exact = "".join(map("".join, zip(["", *gaps[1:]], parts, strict=True)))
    # Atomic groups take the first place of each part, so that the search is no longer than that.
    near = "".join(f"(?>(?:{gap}|.*?){part})" for gap, part in zip(gaps, parts, strict=True))
    far = "".join(f"(?>.*?{part})" for part in parts)
    for pattern in (f"^{gaps[0]}{exact}", exact, f"^{near}", f"^{far}"):
        if found := re.search(pattern, stated):
            return [place for part in range(len(parts)) for place in range(*found.span(part + 1))]
    return None
