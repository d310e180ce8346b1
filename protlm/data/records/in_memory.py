"""Sequences as Python programs hold them: text, objects of Biopython, pairs, lists of these."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from reprlib import repr as short_repr
from typing import Protocol, TypeAlias, runtime_checkable

from Bio.Seq import MutableSeq, Seq, UndefinedSequenceError
from Bio.SeqRecord import SeqRecord

from protlm.data.records.record import Record
from protlm.errors import InputDataError, UserError

Letters: TypeAlias = str | Seq | MutableSeq | SeqRecord | Record
# A pair is a name, which is ignored, and its sequence.
SequenceLike: TypeAlias = Letters | tuple[object, Letters]


@runtime_checkable
class _Array(Protocol):
    ndim: int


def letters_of(given: SequenceLike, name: str = "the sequence") -> str:
    """Returns the letters of a sequence.

    Raises:
        UserError: it is something else; the message has `name`.

    >>> letters_of(("P1", "MKV")), letters_of(SeqRecord(Seq("MKV")))
    ('MKV', 'MKV')
    """
    one = given[1] if isinstance(given, tuple) and len(given) == 2 else given
    one = one.seq if isinstance(one, SeqRecord) else one
    one = one.sequence if isinstance(one, Record) else one
    # Biopython has sequences of unknown letters.
    with suppress(UndefinedSequenceError):
        if isinstance(one, str | Seq | MutableSeq):
            return str(one)
    raise UserError(
        f"{name} is {short_repr(given)} of type {type(given).__name__}; a sequence is a str, a Seq "
        "or SeqRecord of Biopython, or a tuple (name, sequence): leave out what is missing, and "
        "join letters by ''.join(letters)"
    )


def sequences_of(given: Iterable[SequenceLike], call: str) -> list[str]:
    """Returns the letters of each sequence of an iterable, which is read once.

    Raises:
        UserError: it is one sequence, a mapping, a set or a table, or has something that is not a
            sequence; the message says to type `call`.
        InputDataError: a sequence is empty.
    """
    is_table = isinstance(given, _Array) and given.ndim != 1
    is_table |= isinstance(given, Mapping | set | frozenset)
    if is_table or isinstance(given, Letters | bytes) or not isinstance(given, Iterable):
        raise UserError(
            f"one {type(given).__name__} is given where a list of sequences belongs; write {call}; "
            "of a dictionary give the values(), of a table one column"
        )
    found = [letters_of(one, f"sequence {n}") for n, one in enumerate(given, start=1)]
    if "" in found:
        raise InputDataError(f"sequence {found.index('') + 1} is empty; leave it out")
    if len(found) > 2 and all(len(one) == 1 for one in found):
        raise UserError(f"{len(found)} single letters are given; join them: ''.join(letters)")
    return found
