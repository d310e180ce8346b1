"""Variants of a protein: substitutions such as A1P:D2N, insertions and deletions."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from protlm.data.vocabulary import STANDARD, VOCABULARY, capitals
from protlm.system.errors import InputDataError

_CODES = dict(
    re.findall(
        r"(\w+)=(.)",
        "ALA=A ARG=R ASN=N ASP=D CYS=C GLN=Q GLU=E GLY=G HIS=H ILE=I LEU=L LYS=K MET=M PHE=F PRO=P "
        "SER=S THR=T TRP=W TYR=Y VAL=V ASX=B GLX=Z PYL=O SEC=U XAA=X TER=*",
    )
)
_LETTER = "|".join(["[A-Z]", *_CODES])
_SUBSTITUTION = re.compile(rf"(?ai)({_LETTER})([0-9]{{1,9}})({_LETTER}|[=*])")
_INDEL = re.compile(r"[0-9](?:del|dup|ins|[-Δ∆]$)|^[Δ∆]", re.IGNORECASE)
# Names of HGVS, also with the accession of the protein: NP_000537.3:p.[Ala1Pro;Asp2Asn].
_HGVS = re.compile(r"(?ai)(?:(?:NP_|XP_|ENSP)[0-9.]+:)?P\.(\[[^][]*\]|[^][;:]*)")
# Those of Enrich2 and MaveDB, synonymous variants among them, and others that people write.
_WILD_TYPES = ("=", "_WT", "_SY", "WT", "WILD TYPE", "WILD-TYPE", "WILDTYPE", "SYNONYMOUS")
_ADVICE = "give the wild type of these variants, or --first-residue (in Python: first_residue=)"


class Substitution(NamedTuple):
    """A replaced residue; its position counts from 0."""

    wild_type: str
    position: int
    mutant: str


@dataclass(frozen=True, slots=True)
class Variant:
    """The substitutions of a variant, in the order of the text; none of the wild type.

    If residues are inserted or deleted, `indel` is the whole sequence instead.
    """

    substitutions: tuple[Substitution, ...] = ()
    indel: str | None = None

    def __post_init__(self) -> None:
        for own, _, mutant in self.substitutions:
            for letter in (own, mutant):
                if letter not in STANDARD:
                    raise InputDataError(
                        f"{own} replaced by {mutant} has no score, as {letter} is not one of the "
                        f"20 amino acids {STANDARD}; remove this variant"
                    )

    def apply(self, wild_type: str) -> str:
        """Returns the sequence of the variant.

        >>> Variant((Substitution("M", 0, "A"), Substitution("T", 2, "W"))).apply("MKT")
        'AKW'
        """
        if self.indel is not None:
            return self.indel
        residues = list(wild_type)
        for substitution in self.substitutions:
            residues[substitution.position] = substitution.mutant
        return "".join(residues)


def parse_mutant(text: str, wild_type: str, *, first_residue: int = 1) -> Variant:
    """Parses substitutions in the notation of ProteinGym, joined by colons, or of HGVS.

    For instance A1P:D2N, Ala1Pro, p.[Ala1Pro;Asp2Asn], or of the wild type `_wt`, WT or p.=. They
    refer to the wild type, whose first residue has the number `first_residue`.

    >>> parse_mutant("K2R", "MKT").substitutions
    (Substitution(wild_type='K', position=1, mutant='R'),)
    """
    for match in (parts := [_SUBSTITUTION.fullmatch(part) for part in _parts(text)]):
        if match is None or capitals(match[3]) in ("*", "TER"):
            stop = "" if match is None else " but a stop, which has no score"
            advice = "write it as A1P or p.Ala1Pro, and several as A1P:D2N"
            if match is None and _INDEL.search(text):
                advice = "to score insertions and deletions, add a column mutated_sequence"
            raise InputDataError(f"{text.strip()[:50]!r} is not a substitution{stop}; {advice}")
    found = [_parse(match, wild_type, first_residue) for match in parts if match]
    positions = Counter(substitution.position for substitution in found)
    for position, count in positions.items():
        if count > 1:
            raise InputDataError(
                f"{text} replaces position {position + first_residue} more than once; name each "
                "position once"
            )
    return Variant(tuple(found))


def is_mutant(text: str) -> bool:
    """Returns whether a text is substitutions by its notation, which may not fit a wild type.

    >>> is_mutant("A1P:D2N"), is_mutant("p.Ala1Pro"), is_mutant("_wt"), is_mutant("MKT")
    (True, True, True, False)
    """
    return all(_SUBSTITUTION.fullmatch(part) for part in _parts(text))


def _parts(text: str) -> list[str]:
    """Returns the substitutions of a text; none of the wild type."""
    letters = text.strip()
    parts = letters.split(":")
    if hgvs := _HGVS.fullmatch(letters):
        parts = [part.strip(" ()") for part in hgvs[1].strip("[]").split(";")]
    return [] if capitals(parts[0]) in _WILD_TYPES and len(parts) == 1 else parts


def _parse(match: re.Match[str], wild_type: str, first_residue: int) -> Substitution:
    part, number = match[0], int(match[2])
    expected, mutant = (_CODES.get(one, one) for one in map(capitals, match.group(1, 3)))
    position = number - first_residue
    last_residue = first_residue + len(wild_type) - 1
    if not 0 <= position < len(wild_type):
        raise InputDataError(
            f"{part}: position {number} does not exist, the wild type has the residues "
            f"{first_residue} to {last_residue}; {_ADVICE}"
        )
    if wild_type[position] != expected:
        raise InputDataError(
            f"{part}: position {number} of the wild type is {wild_type[position]}, not {expected}; "
            f"{_ADVICE}"
        )
    mutant = expected if mutant == "=" else mutant
    VOCABULARY.encode(mutant, f"{part}: ")
    return Substitution(expected, position, mutant)


def parse_sequence(sequence: str, wild_type: str) -> Variant:
    """Compares the sequence of a variant with the wild type.

    >>> parse_sequence("MRT", "MKT").substitutions
    (Substitution(wild_type='K', position=1, mutant='R'),)
    >>> parse_sequence("MKKT", "MKT").indel
    'MKKT'
    """
    sequence = capitals(sequence)
    VOCABULARY.encode(sequence, "mutated_sequence: ")
    if len(sequence) != len(wild_type):
        return Variant(indel=sequence)
    pairs = enumerate(zip(wild_type, sequence, strict=True))
    return Variant(tuple(Substitution(a, i, b) for i, (a, b) in pairs if a != b))
