"""Models and sequences of PDB and mmCIF files; names, numbers and coordinates of atoms suffice."""

import io
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from protlm.data.records.source import ByteSource
from protlm.errors import InputDataError

if TYPE_CHECKING:
    from Bio.PDB.Model import Model
    from Bio.PDB.Residue import Residue

_MAX_BYTES = 1 << 27
# Chains are named as by the authors, and residues numbered by their position in the sequence.
_NAMES = (
    ("asym_id", "auth", "label"),
    ("atom_id", "label", "auth"),
    ("comp_id", "label", "auth"),
    ("seq_id", "label", "auth"),
)
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
            # An incomplete side chain tells nothing: ligands are marked as heteroatoms.
            is_sure = found == expected or of_pdb is None or residue.id[0] == " "
            if found <= expected and is_sure:
                return letter
    return of_pdb or "X"


def read_model(path: Path, *, is_mmcif: bool) -> "tuple[Model, dict[str, list[str]], list[str]]":
    """Reads the first model, the names in the sequence of each chain, and notes for the user.

    In mmCIF chains are those of `auth_asym_id`, and numbers of `label_seq_id`, where they exist.

    Raises:
        InputDataError: the file is missing, damaged, too large, without atoms, or another format.
    """
    from Bio.PDB.PDBExceptions import PDBConstructionException

    with ByteSource(path, "a structure") as source:
        contents = bytearray()
        for piece in source.chunks():
            contents += piece
            if len(contents) > _MAX_BYTES:
                raise InputDataError(
                    f"{path} has more than {_MAX_BYTES >> 20} MB of text; give the chain alone"
                )
    text = io.StringIO(contents.decode("utf-8", errors="replace"), newline=None)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model, sequences = (_read_mmcif if is_mmcif else _read_pdb)(text)
    except StopIteration:
        raise InputDataError(f"{path} has no atoms; give a complete PDB or mmCIF file") from None
    except (ValueError, LookupError, TypeError, PDBConstructionException) as error:
        kind = "an mmCIF" if is_mmcif else "a PDB"
        raise InputDataError(
            f"{path} cannot be read as {kind} file ({error}); give a complete one"
        ) from error
    twice = sum("defined twice" in str(warning.message) for warning in caught)
    notes = ["give each chain an identifier: {twice:,} atoms are defined twice, the first is used"]
    return model, sequences, [note.format(twice=twice) for note in notes if twice]


def _read_pdb(text: io.StringIO) -> "tuple[Model, dict[str, list[str]]]":
    from Bio.PDB.PDBParser import PDBParser

    structure: Any = PDBParser().get_structure("", text)
    sequences: dict[str, list[str]] = {}
    text.seek(0)
    for line in text:
        if line.startswith("SEQRES"):
            sequences.setdefault(line[11], []).extend(line[19:70].split())
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
        rows = zip(*present, strict=True) if present else [()] * len(columns[0])
        return [next((x for x in row if x not in ("?", ".")), default or "") for row in rows]

    columns = [column(f"Cartn_{axis}") for axis in "xyz"]
    columns += [column(f"{first}_{tag}", f"{second}_{tag}") for tag, first, second in _NAMES]
    columns += [column("pdbx_PDB_ins_code", default=" ")]
    columns += [column("label_alt_id", default=" "), column("occupancy", default="1")]
    columns += [column("group_PDB", default=""), column("pdbx_PDB_model_num", default="1")]
    columns += [column("label_asym_id", default=""), column("label_entity_id", default="")]
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
        key = (chain, name, "H" if is_ligand else " ", int(number), insertion)
        if key != last:
            builder.init_residue(*key[1:])
            last = key
            of_chain = stated.get(row[12]) or stated.get(f"entity {row[13]}")
            if of_chain and not is_ligand:
                sequences.setdefault(chain, of_chain)
        xyz, share = np.array(row[:3], dtype="f"), float(occupancy)
        builder.init_atom(atom, xyz, 0.0, share, alternative, atom, element=atom[:1])
    return builder.get_structure()[0], sequences  # pyright: ignore[reportOptionalSubscript]


def _stated(values: dict[str, Any]) -> dict[str, list[str]]:
    """Returns the names of the residues of each chain and entity, the first of alternatives."""
    found: dict[str, dict[int, str]] = {}
    for prefix, *tags in (
        (
            "",
            "_pdbx_poly_seq_scheme.asym_id",
            "_pdbx_poly_seq_scheme.seq_id",
            "_pdbx_poly_seq_scheme.mon_id",
        ),
        (
            "entity ",
            "_entity_poly_seq.entity_id",
            "_entity_poly_seq.num",
            "_entity_poly_seq.mon_id",
        ),
    ):
        for owner, number, name in zip(*(values.get(tag, []) for tag in tags), strict=False):
            found.setdefault(f"{prefix}{owner}", {}).setdefault(int(number), name)
    return {owner: [names[key] for key in sorted(names)] for owner, names in found.items()}
