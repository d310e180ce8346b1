"""Sites, bonds and regions of proteins, from the features of UniProt's flat files and XML."""

from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b
from heapq import nsmallest
from itertools import count
from pathlib import Path
from typing import NamedTuple

from protlm.data.records import Feature, SequenceFile, Tally
from protlm.data.relatives import unrelated
from protlm.options.prepare import ReadOptions
from protlm.system.errors import InputDataError
from protlm.system.terminal import JobProgress

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
# Those that are not sites, and are read if they are asked for.
_REGIONS = {
    "domain": ("DOMAIN", "domain"),
    "region": ("REGION", "region of interest"),
    "motif": ("MOTIF", "short sequence motif"),
    "coiled_coil": ("COILED", "coiled-coil region"),
    "biased_composition": ("COMPBIAS", "compositionally biased region"),
    "repeat": ("REPEAT", "repeat"),
    **{name.lower(): (name, name.lower()) for name in ("HELIX", "STRAND", "TURN")},
}
_NAME_OF = {kind: name for name, kinds in (_KINDS | _REGIONS).items() for kind in kinds}
BOND = "disulfide_bond"
# Proteins that are drawn for one that is taken, at most; the others are relatives.
_DRAWN = 10


class AnnotatedProtein(NamedTuple):
    """A sequence and its features: first and last residue, from 0, by name."""

    accession: str
    sequence: str
    features: dict[str, list[tuple[int, int]]]


class Annotated(NamedTuple):
    """Proteins with features, in the order in which they were drawn, without relatives.

    And counts: of the proteins of the file that could be drawn, of those drawn, and by reason of
    features left out in the file and of records rejected.
    """

    proteins: list[AnnotatedProtein]
    num_in_file: int
    num_drawn: int
    left_out: dict[str, int]
    rejected: dict[str, int]


def read_annotated(
    path: Path, *, max_proteins: int, max_residues: int, seed: int, detailed: bool = False
) -> Annotated:
    """Draws proteins that have one of the features at certain positions, without relatives.

    The proteins of the file, Swiss-Prot or UniProt XML, are ordered by a hash of the seed and their
    accessions, whatever their order in the file, and those `unrelated` to an earlier one are taken;
    after ten times `max_proteins` there are no more. Features of unknown or uncertain positions or
    of another isoform, and disulfide bonds to other chains, are left out. Warns of rejected
    records. With `detailed`, domains, regions and secondary structure are features too, and each
    feature has also the name "binding_site: ATP", with the first words of its note.
    """
    left_out, tally = Counter[str](), Tally()
    places = count()

    def order(protein: AnnotatedProtein) -> bytes:
        next(places)
        return blake2b(f"{seed} {protein.accession}".encode(), digest_size=16).digest()

    proteins = _proteins(path, max_residues, left_out, tally, detailed)
    # Holds no more proteins than it returns.
    drawn = nsmallest(_DRAWN * max_proteins, proteins, key=order)
    tally.warn_of_rejected(path)
    if not drawn:
        raise InputDataError(
            f"{path} has no protein of at most {max_residues} residues with sites, bonds or "
            "regions; give another file or raise max_residues"
        )
    taken = unrelated((protein.sequence for protein in drawn), limit=max_proteins)
    num_drawn = taken[-1] + 1 if len(taken) == max_proteins else len(drawn)
    return Annotated(
        [drawn[place] for place in taken],
        next(places),
        num_drawn,
        dict(left_out),
        dict(tally.rejected),
    )


def _proteins(
    path: Path, max_residues: int, left_out: Counter[str], tally: Tally, detailed: bool
) -> Iterator[AnnotatedProtein]:
    with (
        SequenceFile(path, ReadOptions(features=True)) as file,
        JobProgress(f"reading {path.name}", None) as progress,
    ):
        if file.format == "fasta":
            raise InputDataError(
                f"{path} is a FASTA file, which has no features; give a Swiss-Prot flat file "
                "(.dat) or UniProt XML"
            )
        for block in file.blocks():
            for record in block.records(tally):
                if len(record.sequence) <= max_residues:
                    found = _usable(record.features or (), len(record.sequence), left_out, detailed)
                    if found:
                        yield AnnotatedProtein(record.identifier, record.sequence, found)
            progress.update(tally.records)


def _usable(
    features: tuple[Feature, ...], length: int, left_out: Counter[str], detailed: bool
) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for kind, first, last, on_isoform, note in features:
        name = _NAME_OF.get(kind)
        if name is None or (name in _REGIONS and not detailed):
            continue
        if on_isoform:
            left_out["on another isoform"] += 1
        elif first is None or last is None:
            left_out["unknown or uncertain position"] += 1
        elif not first <= last < length:
            left_out["position outside the sequence"] += 1
        elif name == BOND and first == last:
            left_out["disulfide bond to another chain"] += 1
        else:
            found.setdefault(name, []).append((first, last))
            if note and detailed:
                found.setdefault(f"{name}: {note.split(', ')[0]}", []).append((first, last))
    return found
