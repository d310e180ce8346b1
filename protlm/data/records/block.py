"""A piece of a sequence file that holds whole records, and what is the same for every format."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import PurePath
from typing import ClassVar

from protlm.data.records.record import STRICT, ReadOptions, Record
from protlm.data.records.residues import NUCLEOTIDES
from protlm.data.records.tally import Tally
from protlm.errors import InputDataError

_NUCLEOTIDE_SHARE, _NUCLEOTIDE_RECORDS, _NUCLEOTIDE_LETTERS = 0.95, 1_000, 50


@dataclass(frozen=True)
class Layout:
    """How the records of a file stand in it, as its first bytes tell.

    Args:
        block: what parses them.
        marker: what a record begins with; a line end at its start belongs to the record before.
        max_record: the longest record that is certain to be kept whole, in bytes.
        num_skipped: bytes before the first record.
        head, tail: what a block needs around it to be parsed (XML: the tags of the root).
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
        source: the file's path, or `standard input`.
        line: the line of the file where the data begin, counted from 1.
        data: the bytes, decompressed, line ends of every kind made `\\n`.
        layout: how records stand in them.
        options: what is taken besides what is right.
        is_first: the file begins with it.
        is_last: the file ends with it.
        is_cut: its last record is so long that its end is left out.
        has_mark: a byte order mark stood before the data.
    """

    format: ClassVar[str]

    source: str
    line: int
    data: bytes
    layout: Layout
    options: ReadOptions = STRICT
    is_first: bool = False
    is_last: bool = False
    is_cut: bool = False
    has_mark: bool = False

    @property
    def file(self) -> str:
        """The file's name, without its folder."""
        return PurePath(self.source).name

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the file."""
        return self.is_first and self.is_last and not self.is_cut

    def records(self, tally: Tally) -> Iterator[Record]:
        """Yields the records that can be used, and counts all of them in `tally`.

        Raises:
            InputDataError: the data cannot be of this format, or (in the first block, and unless
                nucleotides are allowed) the first 1,000 records read like DNA or RNA.
        """
        if self.has_mark:
            tally.change("byte order mark removed")
        records = self._without_cut(tally) if self.is_cut else self._records(self.data, tally)
        if not self.is_first or self.options.allow_nucleotides:
            return records
        # The nucleotides of a file are found out before its first record is used.
        first = list(islice(records, _NUCLEOTIDE_RECORDS))
        self._refuse_nucleotides(first)
        return chain(first, records)

    @abstractmethod
    def _records(self, data: bytes, tally: Tally) -> Iterator[Record]:
        """The records of the data, which begin where the block's do."""

    @abstractmethod
    def _identify(self, record: bytes) -> tuple[str, str]:
        """Identifier of a record that was cut short, and the reason why it cannot be used."""

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
        share = 1 - num_others / max(len(letters), 1)
        if len(letters) >= _NUCLEOTIDE_LETTERS and share >= _NUCLEOTIDE_SHARE:
            raise InputDataError(
                f"{self.source}: {share:.0%} of the letters of the first {len(records):,} records "
                "are ACGTUN: this looks like DNA or RNA; translate it first "
                "(only protlm prepare takes --allow-nucleotides)"
            )
