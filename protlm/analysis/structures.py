"""Protein chains of PDB and mmCIF files: sequences, Cβ atoms and contacts."""

import gzip
import io
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

import numpy as np

from protlm.errors import InputDataError, one_of
from protlm.paths import existing_file

if TYPE_CHECKING:
    from Bio.PDB.Chain import Chain
    from Bio.PDB.Model import Model
    from Bio.PDB.Residue import Residue

CONTACT_ANGSTROM = 8.0
_NAME = re.compile(r"(?P<stem>.+)(?P<kind>\.pdb|\.ent|\.cif)(\.gz)?", re.IGNORECASE)
_GZIP_MAGIC = b"\x1f\x8b"
# A peptide bond is 1.33 Å long; the next nearest C and N of a chain are over 3 Å apart.
_PEPTIDE_BOND_ANGSTROM = 2.0
# Of a larger jump in the numbering, which may mark a fusion, no more residues count as missing.
_MAX_GAP = 100
# Cβ from N, CA and C, as in trRosetta and the contact notebook of ESM: CA–CB bond in ångström,
# angle N–CA–CB and dihedral C–N–CA–CB in radians.
_CB_BOND, _CB_ANGLE, _CB_DIHEDRAL = 1.522, 1.927, -2.143


@final
@dataclass(frozen=True, eq=False)
class Structure:
    """One protein chain.

    Attributes:
        identifier: the file's name without its suffixes, such as `1fuk_A`.
        sequence: one letter a residue; X where the residue is unknown, or skipped by the
            numbering of the file.
        cb_L3: Cβ coordinates in ångström, float64; NaN where unresolved.
        backbone_L43: coordinates of N, CA, C and O.
        chain: the chain's identifier in the file.
        other_chains: the identifiers of the other protein chains of the file.
    """

    identifier: str
    sequence: str
    cb_L3: np.ndarray
    backbone_L43: np.ndarray
    chain: str = ""
    other_chains: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.sequence)

    @property
    def is_resolved(self) -> np.ndarray:
        """For each residue whether its Cβ is known, bool [L]."""
        return ~np.isnan(self.cb_L3[:, 0])


def is_structure(path: Path) -> bool:
    """Returns whether a file is a structure by its name.

    >>> is_structure(Path("1fuk_A.PDB.gz")), is_structure(Path("1fuk.fasta"))
    (True, False)
    """
    return _NAME.fullmatch(path.name) is not None


def structure_files(directory: Path) -> list[Path]:
    """Lists the structure files of a folder, sorted by name.

    Raises:
        InputDataError: the folder does not exist or has no structure.
    """
    if not directory.is_dir():
        raise InputDataError(f"{directory}: no such folder; give a folder of .pdb or .cif files")
    files = sorted(path for path in directory.iterdir() if _NAME.fullmatch(path.name))
    if not files:
        raise InputDataError(
            f"{directory} has no structures: files must end in .pdb, .ent or .cif, each also .gz"
        )
    return files


def read_structure(path: Path, chain: str | None = None) -> Structure:
    """Reads one chain of the first model of a PDB or mmCIF file.

    Modified residues become the residue they derive from (MSE is M); of alternative residues and
    atoms the one of highest occupancy is used; waters and ligands are ignored. Where the numbering
    jumps and the chain is broken, up to 100 missing residues are filled with X.

    Args:
        path: a .pdb, .ent or .cif file, each also gzipped.
        chain: the author's chain identifier; by default the first protein chain.

    Raises:
        InputDataError: an unknown suffix, a damaged file, no protein, or no such chain.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise InputDataError(
            f"{path} is not a structure by its name: it must end in .pdb, .ent or .cif, also .gz"
        )
    chains = _protein_chains(_first_model(path, is_mmcif=match["kind"].lower() == ".cif"))
    if not chains:
        raise InputDataError(f"{path} has no protein chain; give a PDB or mmCIF file of one")
    if chain is not None and chain not in chains:
        raise InputDataError(
            f"{path} has no protein chain {chain!r}; it has: {one_of(list(chains))}"
        )
    chosen = next(iter(chains)) if chain is None else chain
    others = tuple(name for name in chains if name != chosen)
    return Structure(match["stem"], *_with_gaps(chains[chosen]), chosen, others)


def contact_map(structure: Structure, *, threshold: float = CONTACT_ANGSTROM) -> np.ndarray:
    """Returns the contacts, int8 LL.

    An entry is 1 where two Cβ are closer than `threshold` ångström, 0 where they are not, and -1
    where one of them is unresolved.
    """
    difference_LM3 = structure.cb_L3[:, None] - structure.cb_L3[None, :]
    distance_LM = np.sqrt((difference_LM3**2).sum(axis=-1))
    return np.where(np.isnan(distance_LM), -1, distance_LM < threshold).astype(np.int8)


def _first_model(path: Path, *, is_mmcif: bool) -> "Model":
    from Bio.PDB.MMCIFParser import MMCIFParser
    from Bio.PDB.PDBExceptions import PDBConstructionException
    from Bio.PDB.PDBParser import PDBParser

    # QUIET hides Biopython's warnings about irregularities only while a file is parsed.
    parser = MMCIFParser(QUIET=True) if is_mmcif else PDBParser(QUIET=True)
    try:
        contents = existing_file(path, "a structure").read_bytes()
        if contents.startswith(_GZIP_MAGIC):
            contents = gzip.decompress(contents)
        text = contents.decode("utf-8", errors="replace")
        structure = parser.get_structure(path.name, io.StringIO(text))
        assert structure is not None
        return next(structure.get_models())
    except StopIteration:
        raise InputDataError(f"{path} has no atoms; give a complete PDB or mmCIF file") from None
    except (OSError, EOFError, zlib.error) as error:
        raise InputDataError(f"{path} is truncated or damaged ({error}); fetch it again") from error
    except (ValueError, LookupError, TypeError, PDBConstructionException) as error:
        kind = "an mmCIF" if is_mmcif else "a PDB"
        raise InputDataError(
            f"{path} cannot be read as {kind} file ({error}); fetch it again"
        ) from error


def _protein_chains(model: "Model") -> dict[str, "list[Residue]"]:
    chains = {chain.id: _residues(chain) for chain in model}
    return {name: residues for name, residues in chains.items() if residues}


def _residues(chain: "Chain") -> "list[Residue]":
    """Returns the amino acids of the chain in order, without waters and ligands."""
    candidates = [most for most in map(_most_occupied, chain) if _is_amino_acid(most)]
    neighbors = zip([None, *candidates], candidates, [*candidates[1:], None], strict=False)
    # Some ligands (S-adenosylmethionine, free amino acids) have the atoms of an amino acid too:
    # only a bond to the chain distinguishes a modified residue from them.
    return [
        residue
        for before, residue, after in neighbors
        if residue.id[0] == " " or _is_bonded(before, residue) or _is_bonded(residue, after)
    ]


def _most_occupied(residue: "Residue") -> "Residue":
    """Chooses among alternative residues at one position; others are returned unchanged."""
    from Bio.PDB.Residue import DisorderedResidue

    if not isinstance(residue, DisorderedResidue):
        return residue
    return max(
        residue.disordered_get_list(),
        key=lambda alternative: (
            sum(atom.get_occupancy() or 0.0 for atom in alternative) / max(len(alternative), 1)
        ),
    )


def _is_amino_acid(residue: "Residue") -> bool:
    from Bio.Data.PDBData import protein_letters_3to1_extended

    if residue.id[0] == " ":
        return residue.resname in protein_letters_3to1_extended or "CA" in residue
    return all(name in residue for name in ("N", "CA", "C"))


def _is_bonded(before: "Residue | None", after: "Residue | None") -> bool:
    if before is None or after is None or "C" not in before or "N" not in after:
        return False
    return bool(before["C"] - after["N"] < _PEPTIDE_BOND_ANGSTROM)


def _with_gaps(residues: "Sequence[Residue]") -> tuple[str, np.ndarray, np.ndarray]:
    """Returns sequence, Cβ and backbone of residues, with X and NaN for missing ones."""
    from Bio.Data.PDBData import protein_letters_3to1_extended as letters

    sequence: list[str] = []
    coordinates: list[np.ndarray] = []
    unknown = np.full((5, 3), np.nan)
    before = None
    for residue in residues:
        if before is not None and not _is_bonded(before, residue):
            missing = min(max(residue.id[1] - before.id[1] - 1, 0), _MAX_GAP)
            sequence += "X" * missing
            coordinates += [unknown] * missing
        sequence.append(letters.get(residue.resname, "X"))
        backbone = [_atom(residue, name) for name in ("N", "CA", "C", "O")]
        coordinates.append(np.stack([_cb(residue), *backbone]))
        before = residue
    stacked = np.stack(coordinates)
    return "".join(sequence), stacked[:, 0], stacked[:, 1:]


def _atom(residue: "Residue", name: str) -> np.ndarray:
    return residue[name].coord.astype(np.float64) if name in residue else np.full(3, np.nan)


def _cb(residue: "Residue") -> np.ndarray:
    if "CB" in residue:
        return _atom(residue, "CB")
    # NaN if one of the three is missing.
    return imputed_cb(*(_atom(residue, name) for name in ("N", "CA", "C")))


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


def read_folder(
    directory: Path, max_residues: int | None = None
) -> tuple[list[Structure], list[str]]:
    """Returns the structures of a folder, and the names of those that are too long."""
    structures = [read_structure(path) for path in structure_files(directory)]
    if max_residues is None:
        return structures, []
    short = [structure for structure in structures if len(structure) <= max_residues]
    if not short:
        raise InputDataError(
            f"{directory} has no structure of at most {max_residues} residues; "
            "give shorter ones or raise max_residues"
        )
    return short, [s.identifier for s in structures if len(s) > max_residues]
