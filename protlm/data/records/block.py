"""Blocks of whole records: cut from a stream, by its bytes alone, and parsed by their format."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import PurePath
from typing import ClassVar, NamedTuple

import numpy as np

from protlm.data.records.format_detection import FIRST_RECORDS, foreign_letters, refusal
from protlm.data.records.record import STRICT, Record, Tally
from protlm.options.prepare import ReadOptions

BLOCK_BYTES = 4 << 20
# Bytes read beyond the size of a block to find its end, at first.
_FIRST_STEP = 1 << 16


@dataclass(frozen=True)
class RecordFormat:
    """The structure of a file of records, recognized by its first bytes.

    Args:
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
        return PurePath(self.source).name

    @property
    def is_whole(self) -> bool:
        return self.is_first and self.is_last and not self.is_cut

    def records(self, tally: Tally) -> Iterator[Record]:
        """Yields the usable records, and counts all records in `tally`."""
        if self.has_mark:
            tally.changed["byte order mark removed"] += 1
        records = self._without_cut(tally) if self.is_cut else self._records(self.data, tally)
        if not self.is_first or self.options.allow_nucleotides:
            return records
        # Letters that are no residues are detected before the first record is used.
        first = list(islice(records, FIRST_RECORDS))
        if told := foreign_letters([record.sequence.encode() for record in first]):
            raise refusal(self.source, told)
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


class CutBlock(NamedTuple):
    """The bytes of a block, and the number of lines to the start of the next block.

    `is_cut` is true if the end of the last record is left out.
    """

    data: bytes
    num_lines: int
    is_last: bool
    is_cut: bool


def cut(
    stream: Iterator[bytes], marker: bytes, *, max_record: int, size: int | None = None
) -> Iterator[CutBlock]:
    """Cuts before the first record that begins `size` bytes or more after the last cut.

    A record that extends more than `max_record` bytes beyond that is truncated, so that memory
    stays bounded for any stream. The default size is 4 MiB.
    """
    buffer = _StreamBuffer(stream)
    line_end = len(marker) - len(marker.lstrip(b"\n"))
    size = BLOCK_BYTES if size is None else size
    longest = size + max_record
    while not buffer.is_empty():
        end = buffer.find(marker, size, longest)
        if end >= 0:
            data = buffer.take(end + line_end)
            yield CutBlock(data, count_lines(data), is_last=False, is_cut=False)
        elif buffer.has_ended and len(buffer) <= longest:
            yield CutBlock(buffer.take(len(buffer)), 0, is_last=True, is_cut=False)
        else:
            data = buffer.take(longest)
            num_lines = count_lines(data) + buffer.drop_until(marker, line_end)
            yield CutBlock(data, num_lines, is_last=buffer.is_empty(), is_cut=True)


class _StreamBuffer:
    """The bytes that were read from a stream and not yet taken."""

    def __init__(self, stream: Iterator[bytes]) -> None:
        self._stream, self._bytes = stream, b""
        self.has_ended = False

    def __len__(self) -> int:
        return len(self._bytes)

    def is_empty(self) -> bool:
        self._read(1)
        return not self._bytes

    def find(self, marker: bytes, start: int, stop: int) -> int:
        """Returns the position of the first marker between `start` and `stop`, or -1."""
        searched, end, step = start, stop + len(marker) - 1, _FIRST_STEP
        while True:
            self._read(min(searched + step, end))
            place = self._bytes.find(marker, searched, end)
            if place >= 0 or len(self._bytes) >= end or self.has_ended:
                return place
            # Each step copies the buffer; growing steps keep the total cost linear.
            searched, step = max(start, len(self._bytes) - len(marker) + 1), step * 2

    def take(self, end: int) -> bytes:
        data, self._bytes = self._bytes[:end], self._bytes[end:]
        return data

    def drop_until(self, marker: bytes, line_end: int) -> int:
        """Drops the bytes before the next record, and returns their number of line ends."""
        num_lines = 0
        while (found := self.find(marker, 0, BLOCK_BYTES)) < 0:
            if self.is_empty():
                return num_lines
            num_lines += count_lines(self.take(BLOCK_BYTES))
        return num_lines + count_lines(self.take(found + line_end))

    def _read(self, size: int) -> None:
        blocks, length = [self._bytes], len(self._bytes)
        while length < size and not self.has_ended:
            block = next(self._stream, None)
            if block is None:
                self.has_ended = True
            else:
                blocks.append(block)
                length += len(block)
        self._bytes = b"".join(blocks)


def count_lines(data: bytes) -> int:
    """Counts line ends, six times as fast as `bytes.count`."""
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) == ord("\n")))
