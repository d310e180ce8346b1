"""Sequences as Python programs hold them: text, objects of Biopython, pairs, lists of these."""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from reprlib import repr as short_repr
from typing import TypeAlias

from Bio.Seq import MutableSeq, Seq, UndefinedSequenceError
from Bio.SeqRecord import SeqRecord

from protlm.data.records.record import STRICT, Record, Tally, residues
from protlm.data.vocabulary import VOCABULARY, capitals
from protlm.system.errors import InputDataError, UserError

Letters: TypeAlias = str | Seq | MutableSeq | SeqRecord | Record
# A pair is a name, which says only which relatives are its own, and its sequence.
SequenceLike: TypeAlias = Letters | tuple[object, Letters]


def letters_of(given: SequenceLike, name: str = "the sequence") -> str:
    """Returns the letters of a sequence, which messages refer to as `name`.

    >>> letters_of(("P1", "MKV")), letters_of(SeqRecord(Seq("MKV")))
    ('MKV', 'MKV')
    """
    sequence = given[1] if isinstance(given, tuple) and len(given) == 2 else given
    sequence = sequence.seq if isinstance(sequence, SeqRecord) else sequence
    sequence = sequence.sequence if isinstance(sequence, Record) else sequence
    # Biopython has sequences of unknown letters.
    with suppress(UndefinedSequenceError):
        if isinstance(sequence, str | Seq | MutableSeq):
            return str(sequence)
    raise UserError(
        f"{name} is {short_repr(given)} of type {type(given).__name__}; a sequence is a str, a Seq "
        "or SeqRecord of Biopython, or a tuple (name, sequence): leave out what is missing, join "
        "letters by ''.join(letters), and read bytes of h5py as text: dataset.asstr()[:]"
    )


def name_of(given: SequenceLike) -> str:
    """Returns the name of a pair, of a record or of an object of Biopython; "" of letters.

    >>> name_of(("P1", "MKV")), name_of(SeqRecord(Seq("MKV"), id="P2")), name_of("MKV")
    ('P1', 'P2', '')
    """
    if isinstance(given, Record):
        return given.identifier
    if isinstance(given, tuple):
        return str(given[0])
    name = getattr(given, "id", None)
    return "" if name in (None, "<unknown id>") else str(name)


def named_sequences(given: Iterable[SequenceLike], call: str) -> tuple[list[str], list[str]]:
    """Returns the letters of sequences, as `sequences_of` does, and the name of each."""
    given = [*given] if isinstance(given, Iterator) else given
    return sequences_of(given, call), [*map(name_of, given)]


def sequences_of(given: Iterable[SequenceLike], call: str, name: str = "sequence") -> list[str]:
    """Returns the letters of each sequence; an error suggests `call` instead."""
    is_table = getattr(given, "ndim", 1) != 1 or isinstance(given, Mapping | set | frozenset)
    if is_table or isinstance(given, Letters | bytes) or not isinstance(given, Iterable):
        raise UserError(
            f"one {type(given).__name__} is given where a list of sequences belongs; write {call}; "
            "of a dictionary give the values(), of a table one column"
        )
    sequences = [letters_of(one, f"{name} {n}") for n, one in enumerate(given, start=1)]
    if "" in sequences:
        raise InputDataError(f"{name} {sequences.index('') + 1} is empty; leave it out")
    if len(sequences) > 2 and all(len(one) == 1 for one in sequences):
        raise UserError(f"{len(sequences)} single letters are given; join them: ''.join(letters)")
    if isinstance(given, tuple | list) and len(sequences) == 2 and name == "sequence":
        first, second = sequences
        is_lower = re.search("[a-z]", first) and not re.search("[a-z]", second)
        is_short = isinstance(given, tuple) and first.isalpha() and 3 * len(first) <= len(second)
        is_name = (is_lower and len(first) < len(second)) or re.search("[0-9_|]", first)
        if isinstance(given[0], str) and (is_name or is_short):
            raise UserError(
                f"{short_repr(given)} may be a name and its sequence; write [(name, sequence)], or "
                "for two sequences a list of them in capitals: [sequence, sequence]"
            )
    return sequences


def residues_of(
    texts: Iterable[str], name: str = "sequence {}", longest: int | None = None
) -> list[str]:
    """Returns the residues of letters, read as in a file, and warns of what is changed."""
    tally, cleaned = Tally(), []
    for number, letters in enumerate(texts, start=1):
        sequence, reason = residues(letters, tally, STRICT)
        where, size = name.format(number), len(sequence)
        if reason:
            VOCABULARY.encode(capitals("".join(letters.split())).replace("J", "X"), f"{where}: ")
            raise InputDataError(f"{where} is refused: {reason}; leave it out")
        if longest is not None and size > longest:
            raise UserError(f"{where} of {size} residues is longer than the {longest} accepted")
        cleaned.append(sequence)
    del tally.changed["lower case raised"]
    if changed := ", ".join(f"{n:,} {what}" for what, n in tally.changed.items()):
        warnings.warn(f"changed: {changed}", stacklevel=2)
    return cleaned
