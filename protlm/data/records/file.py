"""A sequence file of any supported format, recognized by its first bytes."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Self

from protlm.data.records.block import Block, RecordFormat, cut
from protlm.data.records.fasta import fasta_layout
from protlm.data.records.format_detection import foreign_format, refusal
from protlm.data.records.record import STRICT, Record, Tally
from protlm.data.records.source import ByteSource, with_unix_line_ends
from protlm.data.records.swissprot import swissprot_layout
from protlm.data.records.uniprot_xml import xml_layout
from protlm.options.prepare import ReadOptions
from protlm.system.errors import InputDataError

# Bytes that include everything before the first entry of an XML file.
_START_BYTES = 1 << 16
_KNOWN = (
    "protlm reads FASTA, Swiss-Prot flat files (.dat) and UniProt XML, plain or gzip; protlm "
    "contacts and protlm inspect read structures, too (PDB, mmCIF)"
)
_ALIGNMENTS = "relatives are read from A3M, A2M, Stockholm, and aligned or unaligned FASTA"


class SequenceFile:
    """An open file of proteins: FASTA, Swiss-Prot flat file or UniProt XML, plain or gzip.

    `source` has the number and the hash of its raw bytes, complete after the last block.

    >>> from protlm.system.paths import sample_dir
    >>> tally = Tally()
    >>> with SequenceFile(sample_dir() / "uniprot_tiny.fasta.gz") as file:
    ...     lengths = [len(r.sequence) for block in file.blocks() for r in block.records(tally)]
    >>> file.format, len(lengths), tally.records
    ('fasta', 180, 180)
    """

    def __init__(self, path: Path, options: ReadOptions = STRICT, *, name: str = "") -> None:
        self._options = options
        self.source = ByteSource(
            path,
            "a sequence file",
            name=name,
            or_input=True,
            ignore_trailing_garbage=options.ignore_trailing_garbage,
        )
        try:
            self._stream = with_unix_line_ends(self.source.blocks())
            self._start, self._line = self._beginning()
            self._layout = self._recognized()
        except BaseException:
            self.source.close()
            raise

    @property
    def format(self) -> str:
        """`fasta`, `swissprot` or `xml`."""
        return self._layout.block.format

    def blocks(self) -> Iterator[Block]:
        """Yields the file once, in blocks of whole records of about 4 MiB.

        The ends of blocks depend only on the bytes of the file.
        """
        layout = self._layout
        stream = chain([self._start[layout.num_skipped :]], self._stream)
        line = self._line + self._start.count(b"\n", 0, layout.num_skipped)
        is_first = True
        for found in cut(stream, layout.marker, max_record=layout.max_record):
            yield layout.block(
                self.source.name,
                line,
                found.data,
                layout,
                self._options,
                is_first=is_first,
                is_last=found.is_last,
                is_cut=found.is_cut,
                has_mark=is_first and self.source.has_mark,
            )
            line, is_first = line + found.num_lines, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.source.close()

    def _beginning(self) -> tuple[bytes, int]:
        """Returns the first bytes after leading white space, and their line number."""
        start, line = b"", 1
        for block in self._stream:
            given = start + block
            start = given.lstrip()
            line += given.count(b"\n", 0, len(given) - len(start))
            if len(start) >= _START_BYTES:
                break
        return start, line

    def _recognized(self) -> RecordFormat:
        name, start = self.source.name, self._start
        known = _ALIGNMENTS if self._options.rows else _KNOWN
        if not start:
            raise InputDataError(f"{name}, line 1: the file is empty; {known}")
        layout = (
            fasta_layout(start, self._options) or swissprot_layout(start) or xml_layout(start, name)
        )
        if layout is None:
            raise refusal(f"{name}, line {self._line}", foreign_format(start), f"; {known}")
        return layout


def read_records(
    path: Path, tally: Tally, options: ReadOptions = STRICT, *, name: str = ""
) -> Iterator[Record]:
    """Yields the usable records of a sequence file, in bounded memory.

    Rejected, changed and noted records are counted in `tally`. Messages have the name of the file,
    by default its path.
    """
    with SequenceFile(path, options, name=name) as file:
        for block in file.blocks():
            yield from block.records(tally)
