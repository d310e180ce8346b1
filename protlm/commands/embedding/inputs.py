"""The proteins of `protlm embed`, and the ranges of their residues that a table names."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from protlm.commands.embedding.plan import first_equal
from protlm.data.records.proteins import Proteins
from protlm.data.records.record import Names, Record
from protlm.data.tables import read_columns
from protlm.options.embed import EmbedOptions, Pooling
from protlm.system.errors import InputDataError
from protlm.system.terminal import printable

Ranges = tuple[tuple[int, int], ...]
_COLUMNS = ("accession", "first", "last")
_DIGEST_BYTES = 16


class RangeTable:
    """Ranges of residues by the name of a protein, in the order of a table; without one, none."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._ranges = {} if path is None else _read_ranges(path)
        self._names = Names(self._ranges, path)
        # The protein that each name was found to be.
        self._proteins: dict[str, str] = {}

    def of(self, identifier: str) -> Ranges:
        """Returns the ranges of a protein."""
        return self._ranges.get(self._names.find(identifier) or "", ())

    def observe(self, record: Record) -> None:
        """Refuses a name that may be two proteins, and a range that a protein does not have."""
        name, identifier = self._names.find(record.identifier), record.identifier
        if name is None:
            return
        if (other := self._proteins.setdefault(name, identifier)) != identifier:
            raise InputDataError(
                f"{self._path}: {printable(name)} may be {printable(other)} or "
                f"{printable(identifier)}; write the whole name of the protein"
            )
        last, length = max(end for _, end in self._ranges[name]), len(record.sequence)
        if last > length:
            raise InputDataError(
                f"{self._path}: a range of {printable(name)} ends at residue {last:,}, and it has "
                f"{length:,}; correct the range"
            )

    def refuse_unused(self) -> None:
        """Refuses a name that was not found."""
        if missing := [name for name in self._ranges if name not in self._proteins]:
            raise InputDataError(
                f"{self._path}: {printable(missing[0])} is not among the embedded proteins; "
                "correct the accession or remove its rows"
            )


def _read_ranges(path: Path) -> dict[str, Ranges]:
    """Returns the ranges of each protein, in the order of a table; residues count from 1."""
    ranges: dict[str, Ranges] = {}
    for line, (accession, *ends) in read_columns(path, "a table of ranges", _COLUMNS):
        first, last = (_number(end) for end in ends)
        if not 1 <= first <= last:
            raise InputDataError(
                f"{path}, line {line}: {' to '.join(ends)} is not a range; residues are counted "
                "from 1, and the last one is included"
            )
        ranges[accession] = (*ranges.get(accession, ()), (first, last))
    return ranges


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else 0


class Inputs:
    """The proteins of files with their ranges: read once to divide the work, and again for it.

    A file that changes meanwhile is an error.
    """

    def __init__(self, files: Sequence[Path], options: EmbedOptions, limit: int | None) -> None:
        self.ranges = RangeTable(options.ranges)
        self._digests, self._num_ranges = bytearray(), list[int]()
        # Of proteins whose relatives are found by them.
        self._by_name, self.names = options.relatives.relatives is not None, list[str]()
        self.proteins = Proteins(
            files,
            max_residues=None if options.windows else limit,
            duplicates=options.duplicates,
            observe=self._observe,
        )
        self.ranges.refuse_unused()
        self.lengths = np.array(self.proteins.lengths, np.int64)

    def __iter__(self) -> Iterator[tuple[int, Record]]:
        """Yields the records with their numbers, from 0."""
        number = -1
        for number, record in enumerate(self.proteins):
            start = number * _DIGEST_BYTES
            if self._digest(record) != self._digests[start : start + _DIGEST_BYTES]:
                raise self._changed()
            yield number, record
        if number + 1 != len(self.proteins):
            raise self._changed()

    def queries(self) -> Iterator[tuple[str, str]]:
        """Yields the names and residues of all proteins."""
        return ((record.identifier, record.sequence) for _, record in self)

    @property
    def digest(self) -> str:
        """The SHA-256 of the digests of all proteins."""
        return hashlib.sha256(self._digests).hexdigest()

    def first_equal(self) -> np.ndarray:
        """Returns for each record the number of the first one that equals it."""
        return first_equal(np.frombuffer(bytes(self._digests), np.uint8).reshape(-1, _DIGEST_BYTES))

    def num_rows(self, kind: Pooling) -> np.ndarray:
        """Returns the number of vectors of a kind for each record."""
        if kind is Pooling.ranges:
            return np.array(self._num_ranges, np.int64)
        return self.lengths if kind.is_matrix else np.ones_like(self.lengths)

    def _observe(self, record: Record) -> None:
        self.ranges.observe(record)
        self._digests += self._digest(record)
        if self._by_name:
            self.names.append(record.identifier)
        self._num_ranges.append(len(self.ranges.of(record.identifier)))

    def _digest(self, record: Record) -> bytes:
        """Returns a digest of all that the vectors of a protein depend on."""
        digest = hashlib.blake2b(record.sequence.encode(), digest_size=_DIGEST_BYTES)
        if ranges := self.ranges.of(record.identifier):
            digest.update(repr(ranges).encode())
        if self._by_name:
            digest.update(record.identifier.encode(errors="surrogateescape"))
        return digest.digest()

    def _changed(self) -> InputDataError:
        return InputDataError(
            f"{self.proteins.name} has changed while it was read: type the same command again"
        )
