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
class _HasDimensions(Protocol):
    """An array or a table."""

    ndim: int


def letters_of(given: SequenceLike, name: str = "the sequence") -> str:
    """Returns the letters of a sequence.

    Args:
        given: text, Seq, SeqRecord or Record, or a pair of a name and one of these.
        name: what the sequence is called in the message.

    Raises:
        UserError: anything else; the message has its value and type.

    >>> letters_of(("P1", "MKV")), letters_of(SeqRecord(Seq("MKV")))
    ('MKV', 'MKV')
    """
    is_pair = isinstance(given, tuple) and len(given) == 2
    one: object = given[1] if is_pair else given
    if isinstance(one, SeqRecord):
        one = one.seq
    if isinstance(one, Record):
        return one.sequence
    if isinstance(one, str | Seq | MutableSeq):
        # Biopython allows a sequence of a length whose letters are unknown.
        with suppress(UndefinedSequenceError):
            return str(one)
    raise UserError(
        f"{name} is {short_repr(given)} of type {type(given).__name__}; a sequence is a str, a Seq "
        "or SeqRecord of Biopython, or a tuple (name, sequence): leave out what is missing, and "
        "join letters by ''.join(letters)"
    )


def sequences_of(given: Iterable[SequenceLike], call: str) -> list[str]:
    """Returns the letters of each sequence of an iterable, which is read once.

    Args:
        given: the sequences.
        call: how the method is called with one sequence, for messages.

    Raises:
        UserError: one sequence, a mapping or a table, whose keys are not its sequences, or
            something that is not a sequence in it.
        InputDataError: a sequence is empty.
    """
    if isinstance(given, Letters | bytes) or not isinstance(given, Iterable):
        raise UserError(
            f"one {type(given).__name__} is given where a list of sequences belongs; write {call}"
        )
    if isinstance(given, Mapping) or (isinstance(given, _HasDimensions) and given.ndim != 1):
        raise UserError(
            f"a {type(given).__name__} is given where a list of sequences belongs, and its keys, "
            "columns or rows are not sequences; give its values(), or one column"
        )
    found = [letters_of(one, f"sequence {n}") for n, one in enumerate(given, start=1)]
    if "" in found:
        raise InputDataError("a sequence is empty; leave it out")
    return found
