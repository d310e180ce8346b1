"""Protein chains of PDB and mmCIF files, their Cβ atoms and contacts; proteins of evaluations."""

import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, final

import numpy as np

from protlm.analysis.structure_files import (
    Residue,
    are_alternatives,
    is_bonded,
    letter_of,
    places_in,
    read_model,
    residue_letters,
)
from protlm.data.records import Tally, read_records
from protlm.data.records.format_detection import structure_format
from protlm.data.records.source import STANDARD_INPUT, ByteSource
from protlm.model.pretrained import PretrainedModel
from protlm.system.errors import InputDataError, OptionError, UserError, one_of
from protlm.system.paths import existing_file, sample_dir
from protlm.system.terminal import printable

CONTACT_ANGSTROM = 8.0
_ENDING = re.compile(r"(?<=.)\.(pdb|ent|cif|mmcif)(\.gz)?\Z", re.IGNORECASE)
# A larger jump in the numbering counts no missing residues: it may mark a fusion.
_MAX_GAP = 1_000
# What ends a chain in place of a residue.
_CAPS = ("ACE", "FOR", "NH2", "NMA", "NME")
_SHOWN_NOTES = 5
# Files of a structure have three decimals, and some programs two.
_ROUNDING_ANGSTROM = 0.02
_APART = "give each residue of a chain its own number, or name chains differently"
# Cβ from N, CA and C, as in trRosetta and the contact notebook of ESM: CA–CB bond in ångström,
# angle N–CA–CB and dihedral C–N–CA–CB in radians.
_CB_BOND, _CB_ANGLE, _CB_DIHEDRAL = 1.522, 1.927, -2.143


@final
@dataclass(frozen=True, eq=False)
class Structure:
    """One protein chain, the identifier of which is the name of its file without endings.

    The sequence has one letter a residue, also of those without coordinates, X where unknown. Of Cβ
    and of the backbone, N, CA, C and O, it has coordinates in ångström, NaN where unresolved. The
    file has the `other_chains` of proteins, too; `notes` are lines on it for the user.
    """

    identifier: str
    sequence: str
    cb_L3: np.ndarray
    backbone_L43: np.ndarray
    chain: str = ""
    other_chains: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.sequence)

    def resolved(self) -> tuple[str, np.ndarray]:
        """Returns the letters and backbones of the residues that have a CA atom."""
        places = np.flatnonzero(~np.isnan(self.backbone_L43[:, 1, 0]))
        return "".join(self.sequence[place] for place in places), self.backbone_L43[places]


def is_structure(path: Path) -> bool:
    """Returns whether a file is a structure by its name or its first line.

    >>> is_structure(Path("1fuk_A.PDB.gz")), is_structure(Path("1fuk.fasta"))
    (True, False)
    """
    if _ENDING.search(path.name) or path == STANDARD_INPUT or not path.is_file():
        return _ENDING.search(path.name) is not None
    with ByteSource(path, "a sequence file or a structure") as source:
        return bool(structure_format(next(source.blocks())))


def structure_files(directory: Path, *, tells: bool = False) -> list[Path]:
    """Lists the structure files of a folder, sorted by name, and prints how many are hidden."""
    if not directory.is_dir():
        raise InputDataError(f"{directory}: no such folder; give a folder of .pdb or .cif files")
    # Macs write ._x.pdb beside x.pdb, and .DS_Store.
    hidden = [path for path in directory.glob(".*") if path.is_file()]
    if hidden and tells:
        print(
            printable(
                f"{directory}: hidden files skipped: {len(hidden):,}, such as {min(hidden).name}"
            ),
            file=sys.stderr,
        )
    named = {path for path in directory.iterdir() if _ENDING.search(path.name)}
    files = sorted(named.difference(hidden))
    if not files:
        raise InputDataError(
            f"{directory} has no structures: files must end in .pdb, .ent, .cif or .mmcif, also .gz"
        )
    return files


def read_structure(path: Path, chain: str | None = None) -> Structure:
    """Reads one chain of the first model of a PDB or mmCIF file, by default the first protein.

    The sequence is that of SEQRES, or of the entity in mmCIF, also of residues without coordinates;
    caps such as ACE are left out. Without it, X fills gaps where the chain is broken, as many as
    the numbering skips. Modified residues become the residue they derive from (MSE is M, HSD is H);
    of alternative residues and atoms the one of highest occupancy is used; waters and ligands are
    ignored. In mmCIF chains are those of `auth_asym_id`.
    """
    found, sequences, notes = read_model(path)
    chains = {name: some for name, all_of in found.items() if (some := _residues(all_of))[0]}
    if not chains:
        raise InputDataError(f"{path} has no protein chain; give a PDB or mmCIF file of one")
    if chain is not None and chain not in chains:
        raise InputDataError(
            f"{path} has no protein chain {chain!r}; it has: {one_of(list(chains))}"
            " (auth_asym_id in mmCIF)"
        )
    chosen = next(iter(chains)) if chain is None else chain
    others = tuple(name for name in chains if name != chosen)
    residues, num_left_out = chains[chosen]
    if num_left_out and not residues[1:]:
        raise InputDataError(
            f"{path}, chain {chosen}: all residues have the number {residues[0].number}; give each "
            "residue of a chain its own number"
        )
    rows, of_gaps = _rows(residues, sequences.get(chosen, []))
    letters, atoms_L53, unknown = _with_gaps(rows)
    notes += [
        f"chain {chosen}: {note}"
        for note in (*_notes_on(residues, num_left_out), *of_gaps, *unknown)
    ]
    return Structure(
        _ENDING.sub("", path.name),
        letters,
        atoms_L53[:, 0],
        atoms_L53[:, 1:],
        chosen,
        others,
        tuple(notes),
    )


def read_chain(path: Path, chain: str | None) -> Structure | None:
    """Reads the chain that a user asks for; None if the file is not a structure.

    Prints the notes on it and, if none is asked for, which of several is used.
    """
    if not is_structure(path):
        if chain is not None:
            raise UserError(
                f"a chain is of a PDB or mmCIF file, and {path} is a sequence file", {"chain": None}
            )
        return None
    structure = read_structure(existing_file(path, "a sequence file or a structure"), chain)
    if chain is None and structure.other_chains:
        print(
            printable(
                f"{path}: chain {structure.chain} is used; other chains: "
                f"{', '.join(structure.other_chains)}"
            ),
            file=sys.stderr,
        )
    for note in structure.notes:
        print(printable(f"{path}, {note}"), file=sys.stderr)
    return structure


def contact_map(structure: Structure) -> np.ndarray:
    """Returns the contacts, int8 LL: 1 if two Cβ are closer than 8 Å, -1 if one is unresolved."""
    distance_LM = np.sqrt(sum(np.subtract.outer(x_L, x_L) ** 2 for x_L in structure.cb_L3.T))
    contacts_LM = (distance_LM < CONTACT_ANGSTROM).astype(np.int8)
    contacts_LM[np.isnan(distance_LM)] = -1
    return contacts_LM


def _residues(chain: Sequence[Residue]) -> tuple[list[Residue], int]:
    """Returns the amino acids in order, one for each number, and how many others are left out.

    Of alternatives that with the highest mean occupancy is kept, or the first in the file.
    """
    numbers: dict[tuple[int, str], list[Residue]] = {}
    for residue in filter(_is_amino_acid, chain):
        numbers.setdefault((residue.number, residue.insertion), []).append(residue)
    groups, residues, num_left_out = list(numbers.values()), list[Residue](), 0
    for before, group, after in zip([[], *groups], groups, [*groups[1:], []], strict=False):
        # Some ligands (S-adenosylmethionine, free amino acids) have the atoms of an amino acid too:
        # only a bond to the chain distinguishes a modified residue from them.
        in_chain = [
            residue
            for residue in group
            if not residue.is_ligand
            or any(is_bonded(other, residue) for other in before)
            or any(is_bonded(residue, other) for other in after)
        ]
        if in_chain:
            options = [
                residue
                for residue in group
                if are_alternatives(in_chain[0], residue, is_in_chain=residue in in_chain)
            ]
            num_left_out += len({*in_chain} - {*options})
            chosen = max(options, key=lambda option: fmean(option.occupancies.values()))
            chosen.options = tuple(option.name for option in options)
            residues.append(chosen)
    return residues, num_left_out


def _notes_on(residues: Sequence[Residue], num_left_out: int) -> list[str]:
    several = [f"{x.number} {x.name}" for x in residues if len(set(x.options)) > 1]
    if more := len(several[_SHOWN_NOTES:]):
        several[_SHOWN_NOTES:] = [f"and {more:,} more"]
    named = f"of alternative residues the most occupied is used: {', '.join(several)}"
    left_out = f"residues left out, whose numbers were there before: {num_left_out:,}; {_APART}"
    return [named] * bool(several) + [left_out] * bool(num_left_out)


def _is_amino_acid(residue: Residue) -> bool:
    is_known, has_ca = residue.name in residue_letters(), "CA" in residue.atoms
    if not residue.is_ligand:
        # The calcium ion is an atom CA in a residue CA; some programs have a CA in caps, too.
        return is_known or (has_ca and residue.name not in ("CA", *_CAPS))
    return (is_known and has_ca) or residue.atoms.keys() >= {"N", "CA", "C"}


def _rows(
    residues: Sequence[Residue], stated: Sequence[str]
) -> tuple[list[tuple[Residue | None, str]], list[str]]:
    """Returns the residues with their names, None for those without coordinates, and notes."""
    names = [name for name in stated if name not in _CAPS]
    places = places_in("".join(residue_letters().get(name, "X") for name in names), residues)
    if places is not None:
        found = dict(zip(places, residues, strict=True))
        rows = [(found.get(place), name) for place, name in enumerate(names)]
        if absent := len(rows) - len(residues):
            return rows, [
                f"{absent} of {len(rows)} residues have no coordinates; their letters are from the "
                "sequence that the file states"
            ]
        return rows, []
    unfit = "the sequence that the file states does not fit its atoms, and is not used"
    rows, notes = [], [unfit] if stated else []
    for before, residue in zip([None, *residues], residues, strict=False):
        if before is not None and not is_bonded(before, residue):
            skipped = residue.number - before.number - 1
            put = skipped if 0 < skipped < _MAX_GAP else 0
            rows += [(None, "")] * put
            if skipped not in (-1, 0):
                notes.append(
                    f"numbers go from {before.number} to {residue.number} at a break; "
                    f"{put} residues X are put there"
                )
        rows.append((residue, residue.name))
    return rows, notes


def _with_gaps(rows: Sequence[tuple[Residue | None, str]]) -> tuple[str, np.ndarray, list[str]]:
    """Returns letters, the atoms CB, N, CA, C and O, NaN for missing ones, and notes."""
    absent = [residue_letters().get(name, "X") for _, name in rows]
    letters = [letter_of(row[0]) if row[0] else x for row, x in zip(rows, absent, strict=True)]
    unknown = Counter(row[1] for row, x in zip(rows, letters, strict=True) if x == "X" and row[1])
    names = ", ".join(f"{count} {name}" for name, count in unknown.most_common())
    notes = [f"residues of unknown kind are X: {names}"] if names else []
    missing = np.full((5, 3), np.nan)
    atoms_L53 = np.stack([_atoms(residue) if residue else missing for residue, _ in rows])
    if np.isnan(atoms_L53[:, 0]).all():
        notes.append("it has neither CB nor N, CA and C to place it, so that no contact is known")
    return "".join(letters), atoms_L53, notes


def _atoms(residue: Residue) -> np.ndarray:
    cb, *backbone = (
        residue.atoms.get(name, np.full(3, np.nan)).astype(np.float64)
        for name in ("CB", "N", "CA", "C", "O")
    )
    if "CB" not in residue.atoms:
        # NaN if one of the three is missing, or if they are in a line.
        with np.errstate(invalid="ignore", divide="ignore"):
            cb = imputed_cb(*backbone[:3])
    return np.stack([cb, *backbone])


def imputed_cb(n: np.ndarray, ca: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Returns the ideal position of the Cβ of a residue from its backbone atoms, in ångström, [3].

    The geometry is that of trRosetta (Yang et al. 2020), as in the contact notebook of ESM.
    """
    bond = (n - ca) / np.linalg.norm(n - ca)
    normal = np.cross(n - c, bond)
    normal /= np.linalg.norm(normal)
    return ca + _CB_BOND * (
        np.cos(_CB_ANGLE) * bond
        + np.sin(_CB_ANGLE) * np.cos(_CB_DIHEDRAL) * np.cross(normal, bond)
        - np.sin(_CB_ANGLE) * np.sin(_CB_DIHEDRAL) * normal
    )


def is_repeat(path: Path, structure: Structure, seen: dict[str, tuple[Path, Structure]]) -> bool:
    """Returns whether a structure was seen in another file, and prints it, or adds it to `seen`.

    It is the same if its resolved residues and their backbones are; another one of its name is
    refused.
    """
    first, other = seen.setdefault(structure.identifier, (path, structure))
    if other is structure:
        return False
    (letters, atoms_L43), (of_other, other_L43) = structure.resolved(), other.resolved()
    is_same = letters == of_other and np.allclose(
        atoms_L43, other_L43, rtol=0, atol=_ROUNDING_ANGSTROM, equal_nan=True
    )
    if not is_same:
        raise InputDataError(
            f"{first} and {path} are two different structures named {structure.identifier}; "
            "rename one of them or leave it out"
        )
    print(printable(f"{path} has the structure of {first} again, and is left out"), file=sys.stderr)
    return True


def read_folder(
    directory: Path, max_residues: int | None = None
) -> tuple[list[Structure], list[str]]:
    """Returns the structures of a folder, the first protein chain of each, and the too long ones.

    Prints the first notes on them, what is hidden, and what is there twice.
    """
    seen: dict[str, tuple[Path, Structure]] = {}
    read = [(path, read_structure(path)) for path in structure_files(directory, tells=True)]
    structures = [structure for path, structure in read if not is_repeat(path, structure, seen)]
    notes = [f"{path}, {note}" for path, structure in seen.values() for note in structure.notes]
    if more := len(notes[_SHOWN_NOTES:]):
        notes[_SHOWN_NOTES:] = [f"and {more} more such notes on structures"]
    for note in notes:
        print(printable(note), file=sys.stderr)
    if max_residues is None:
        return structures, []
    short = [structure for structure in structures if len(structure) <= max_residues]
    if not short:
        raise InputDataError(
            f"{directory} has no structure of at most {max_residues:,} residues; give shorter ones"
        )
    return short, [s.identifier for s in structures if len(s) > max_residues]


def structures_folder(setting: str, shipped: str = "test") -> Path:
    """Returns the folder of structures of a setting: `sample` is a shipped one, `test` or `fit`."""
    return sample_dir() / "structures" / shipped if setting == "sample" else Path(setting)


def check_limit(name: str, value: int) -> None:
    """Refuses a limit that no protein is within."""
    if value < 1:
        raise OptionError(f"{name}={value} excludes every protein; give 1 or more")


def longest_read(model: PretrainedModel, max_residues: int) -> int:
    """Returns the largest number of residues that a setting and the model allow."""
    return min(max_residues, model.max_residues or max_residues)


class Protein(NamedTuple):
    """A sequence, with its structure where it is known."""

    identifier: str
    sequence: str
    structure: Structure | None = None

    def contacts(self) -> np.ndarray:
        assert self.structure is not None
        return contact_map(self.structure)


@final
@dataclass(frozen=True)
class ProteinChoice:
    """The settings that choose proteins: the first ones of structures, or of a sequence file.

    Relatives among them are not left out, while intervals and p-values over proteins treat them as
    independent: give a file or folder without close homologs. Longer proteins are excluded, as are
    those longer than the model accepts. `shipped` is as for `structures_folder`.
    """

    structures: str
    max_proteins: int
    max_residues: int
    sequences: str | None = None
    shipped: str = "test"

    def __post_init__(self) -> None:
        check_limit("max_proteins", self.max_proteins)
        check_limit("max_residues", self.max_residues)

    def read(self, model: PretrainedModel) -> list[Protein]:
        limit = longest_read(model, self.max_residues)
        if self.sequences is None:
            found, _ = read_folder(structures_folder(self.structures, self.shipped), limit)
            return [Protein(s.identifier, s.sequence, s) for s in found[: self.max_proteins]]
        tally, path = Tally(), Path(self.sequences)
        short = (r for r in read_records(path, tally) if len(r.sequence) <= limit)
        proteins = [Protein(r.identifier, r.sequence) for r in islice(short, self.max_proteins)]
        tally.warn_of_rejected(path)
        if not proteins:
            raise InputDataError(
                f"{path} has no protein of at most {limit} residues; give shorter ones or raise "
                "max_residues"
            )
        return proteins
