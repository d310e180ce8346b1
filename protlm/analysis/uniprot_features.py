"""Sites, bonds and regions of proteins, from the features of UniProt's flat files and XML."""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from protlm.data.records import Feature, ReadOptions, SequenceFile, Tally
from protlm.errors import InputDataError

# The kinds in flat files and in XML. BINDING includes METAL, NP_BIND and CA_BIND since 2022.
_KINDS = {
    "binding_site": (
        *("BINDING", "METAL", "NP_BIND", "CA_BIND", "binding site", "metal ion-binding site"),
        *("nucleotide phosphate-binding region", "calcium-binding region"),
    ),
    "active_site": ("ACT_SITE", "active site"),
    "modified_residue": ("MOD_RES", "modified residue"),
    "glycosylation": ("CARBOHYD", "glycosylation site"),
    "lipidation": ("LIPID", "lipid moiety-binding region"),
    "transmembrane": ("TRANSMEM", "transmembrane region"),
    "signal_peptide": ("SIGNAL", "signal peptide"),
    "transit_peptide": ("TRANSIT", "transit peptide"),
    "dna_binding": ("DNA_BIND", "DNA-binding region"),
    "zinc_finger": ("ZN_FING", "zinc finger region"),
    "disulfide_bond": ("DISULFID", "disulfide bond"),
}
_NAME_OF = {kind: name for name, kinds in _KINDS.items() for kind in kinds}
BOND = "disulfide_bond"
SITES = tuple(name for name in _KINDS if name != BOND)


class AnnotatedProtein(NamedTuple):
    """A sequence and its features: first and last residue, from 0, by name."""

    sequence: str
    features: dict[str, list[tuple[int, int]]]

    def is_site(self) -> np.ndarray:
        """Returns which residues belong to features of each of `SITES`, bool [sites, L]."""
        found = np.zeros((len(SITES), len(self.sequence)), dtype=bool)
        for row, name in zip(found, SITES, strict=True):
            for first, last in self.features.get(name, ()):
                row[first : last + 1] = True
        return found

    def bonds(self) -> np.ndarray:
        """Returns which pairs of residues a disulfide bond connects, bool LL, symmetric."""
        found_LL = np.zeros((len(self.sequence),) * 2, dtype=bool)
        for pair in self.features.get(BOND, ()):
            found_LL[pair, pair[::-1]] = True
        return found_LL


class Annotated(NamedTuple):
    """Proteins with features, and the number of features that were left out, by reason."""

    proteins: list[AnnotatedProtein]
    left_out: dict[str, int]


def read_annotated(path: Path, *, max_proteins: int, max_residues: int) -> Annotated:
    """Reads the first proteins that have one of the features at certain positions.

    Features of unknown or uncertain positions and disulfide bonds to other chains are left out.

    Args:
        path: a Swiss-Prot flat file or UniProt XML, plain or gzip.
        max_proteins: the number of proteins.
        max_residues: longer proteins are excluded.

    Raises:
        InputDataError: the file cannot be read, or has no such protein.
    """
    proteins: list[AnnotatedProtein] = []
    left_out: Counter[str] = Counter()
    tally = Tally()
    with SequenceFile(path, ReadOptions(features=True)) as file:
        if file.format == "fasta":
            raise InputDataError(
                f"{path} is a FASTA file, which has no features; give a Swiss-Prot flat file "
                "(.dat) or UniProt XML"
            )
        for block in file.blocks():
            for record in block.records(tally):
                length = len(record.sequence)
                if length > max_residues or len(proteins) == max_proteins:
                    continue
                found = _usable(record.features or (), length, left_out)
                if found:
                    proteins.append(AnnotatedProtein(record.sequence, found))
            if len(proteins) == max_proteins:
                break
    if not proteins:
        raise InputDataError(
            f"{path} has no protein of at most {max_residues} residues with sites, bonds or "
            "regions; give another file or raise max_residues"
        )
    return Annotated(proteins, dict(left_out))


def _usable(
    features: tuple[Feature, ...], length: int, left_out: Counter[str]
) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for kind, first, last in features:
        name = _NAME_OF.get(kind)
        if name is None:
            continue
        if first is None or last is None:
            left_out["unknown or uncertain position"] += 1
        elif not first <= last < length:
            left_out["position outside the sequence"] += 1
        elif name == BOND and first == last:
            left_out["disulfide bond to another chain"] += 1
        else:
            found.setdefault(name, []).append((first, last))
    return found
