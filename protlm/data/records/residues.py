"""Conversion of a record's letters to residues: normalized where safe, rejected otherwise."""

from collections.abc import Sequence

from protlm.data.records.record import ReadOptions, Tally
from protlm.data.vocabulary import RESIDUES, STANDARD

MAX_RESIDUES = 100_000
NUL, GAP = "NUL byte", "gap"
TOO_LONG = f"longer than {MAX_RESIDUES:,} residues"

NUCLEOTIDES = b"ACGTUN"
_NUCLEOTIDES = NUCLEOTIDES.decode()
_STANDARD = STANDARD.encode()
_RESIDUES = RESIDUES.encode()
_WHITESPACE = b" \t\n\v\f\r\x1c\x1d\x1e\x1f"
_GAPS = b"-.~"
_REASONS = (
    (NUL, b"\0"),
    ("'>' inside a line", b">"),
    ("'*' inside the sequence", b"*"),
    (GAP, _GAPS),
    ("digit", b"0123456789"),
)


def residues(letters: str, tally: Tally, options: ReadOptions) -> tuple[str, str]:
    """Returns the sequence, or an empty string and the reason for rejecting the record.

    Letters are converted to upper case, white space and a terminal `*` are removed, and J is
    replaced by X; changes are counted in `tally`.
    """
    if not letters.isascii():
        return "", "letter that is not ASCII"
    sequence = letters.encode()
    if sequence.translate(None, _STANDARD):
        sequence, reason = _normalize(sequence, tally, options)
        if reason:
            return "", reason
        letters = sequence.decode()
    if not sequence:
        return "", "blank sequence"
    if len(sequence) > MAX_RESIDUES:
        return "", TOO_LONG
    if not sequence.lstrip(NUCLEOTIDES):
        tally.note("record of the letters ACGTUN alone")
    return letters, ""


def are_standard(sequences: Sequence[str]) -> bool:
    """Returns whether `residues` would accept all sequences unchanged and without counts.

    >>> are_standard(["MKV", "W"]), are_standard(["MKV", "X"]), are_standard(["MKV", "ACGT"])
    (True, False, False)
    """
    letters = "".join(sequences)
    return (
        letters.isascii()
        and not letters.encode().translate(None, _STANDARD)
        and max(map(len, sequences)) <= MAX_RESIDUES
        # A blank sequence is also false here.
        and all(sequence.lstrip(_NUCLEOTIDES) for sequence in sequences)
    )


def _normalize(letters: bytes, tally: Tally, options: ReadOptions) -> tuple[bytes, str]:
    """Returns the residues of letters that are not all standard, or the reason for rejection."""
    given = letters.translate(None, _WHITESPACE)
    ungapped = given.translate(None, _GAPS) if options.allow_gaps else given
    capitals = ungapped.upper()
    sequence = capitals.rstrip(b"*")
    if foreign := sequence.translate(None, _RESIDUES + b"J"):
        found = set(foreign)
        return b"", next(
            (reason for reason, kind in _REASONS if found & set(kind)),
            "character that is not a letter",
        )
    if not sequence:
        return b"", "blank sequence"
    if ungapped != given:
        tally.change("gaps removed")
    if capitals != ungapped:
        tally.change("lower case raised")
    if sequence != capitals:
        tally.change("terminal '*' removed")
    if b"J" in sequence:
        tally.change("J written as X")
    if sequence.translate(None, _STANDARD + b"J"):
        tally.note("record with B, O, U, X or Z")
    return sequence.replace(b"J", b"X"), ""
