"""A piece of a sequence file with whole records, and the code common to all formats."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import PurePath
from typing import ClassVar

from protlm.data.records.record import STRICT, ReadOptions, Record
from protlm.data.records.residues import NUCLEOTIDES
from protlm.data.records.tally import Tally
from protlm.system.errors import InputDataError

_NUCLEOTIDE_FRACTION, _NUCLEOTIDE_RECORDS, _NUCLEOTIDE_LETTERS = 0.95, 1_000, 50


@dataclass(frozen=True)
class RecordFormat:
    """The structure of a file of records, recognized by its first bytes.

    Args:
        block: class of the blocks, which parses the records.
        marker: bytes at the start of a record; a leading line end belongs to the previous record.
        max_record: maximum size of a record that is never truncated, in bytes.
        num_skipped: number of bytes before the first record.
        head, tail: bytes that must surround a block for parsing (XML: the tags of the root).
    """

    block: type["Block"]
    marker: bytes
    max_record: int
    num_skipped: int = 0
    head: bytes = b""
    tail: bytes = b""


@dataclass(frozen=True)
class Block(ABC):
    """Whole records of a sequence file, as bytes; small, picklable, and parsed by any process.

    Args:
        source: path of the file, or `standard input`.
        line: line of the file at which the data begin, counted from 1.
        data: decompressed bytes, with all line ends converted to `\\n`.
        layout: structure of the file.
        options: which deviations from the formats are accepted.
        is_first: whether this is the first block of the file.
        is_last: whether this is the last block of the file.
        is_cut: whether the last record is truncated because of its length.
        has_mark: whether a byte order mark preceded the data.
    """

    format: ClassVar[str]

    source: str
    line: int
    data: bytes
    layout: RecordFormat
    options: ReadOptions = STRICT
    is_first: bool = False
    is_last: bool = False
    is_cut: bool = False
    has_mark: bool = False

    @property
    def file(self) -> str:
        """Name of the file, without its folder."""
        return PurePath(self.source).name

    @property
    def is_whole(self) -> bool:
        """Whether the block is the complete file."""
        return self.is_first and self.is_last and not self.is_cut

    def records(self, tally: Tally) -> Iterator[Record]:
        """Yields the usable records, and counts all records in `tally`."""
        if self.has_mark:
            tally.change("byte order mark removed")
        records = self._without_cut(tally) if self.is_cut else self._records(self.data, tally)
        if not self.is_first or self.options.allow_nucleotides:
            return records
        # Nucleotides are detected before the first record is used.
        first = list(islice(records, _NUCLEOTIDE_RECORDS))
        self._refuse_nucleotides(first)
        return chain(first, records)

    @abstractmethod
    def _records(self, data: bytes, tally: Tally) -> Iterator[Record]:
        """Yields the records of the data, which begin at the start of the block."""

    @abstractmethod
    def _identify(self, record: bytes) -> tuple[str, str]:
        """Returns the identifier of a truncated record, and the reason for rejecting it."""

    def _without_cut(self, tally: Tally) -> Iterator[Record]:
        line_end = self.layout.marker.startswith(b"\n")
        begin = max(self.data.rfind(self.layout.marker) + line_end, 0)
        yield from self._records(self.data[:begin], tally)
        line = self.line + self.data.count(b"\n", 0, begin)
        tally.records += 1
        identifier, reason = self._identify(self.data[begin:])
        self._reject(tally, reason, identifier or f"line:{line}", line)

    def _reject(self, tally: Tally, reason: str, identifier: str, line: int) -> None:
        tally.reject(reason, identifier, self.file, line)

    def _refuse_nucleotides(self, records: list[Record]) -> None:
        letters = "".join(record.sequence for record in records).encode()
        num_others = len(letters.translate(None, NUCLEOTIDES))
        fraction = 1 - num_others / max(len(letters), 1)
        if len(letters) >= _NUCLEOTIDE_LETTERS and fraction >= _NUCLEOTIDE_FRACTION:
            raise InputDataError(
                f"{self.source}: {fraction:.0%} of the letters of the first {len(records):,} "
                "records are ACGTUN: this looks like DNA or RNA; translate it first "
                "(only protlm prepare has --allow-nucleotides)"
            )
