"""FASTA records: Biopython's parser inside, strict and counting where that parser is silent."""

import hashlib
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TextIO

from Bio.SeqIO.FastaIO import SimpleFastaParser

from protlm.data.records import Record, Tally
from protlm.data.records.source import TextSource
from protlm.data.vocabulary import RESIDUES, STANDARD
from protlm.errors import InputDataError

MAX_RESIDUES = 100_000
NUL = "NUL byte"
# The longest header that is kept, and the longest piece a line is read in.
_PIECE = 1 << 16
_MAX_CHARACTERS = 4 * MAX_RESIDUES
_UNIPROT = re.compile(r"(?:sp|tr)\|([^|\s]+)\|")

_STANDARD = STANDARD.encode()
_RESIDUES = RESIDUES.encode()
# Biopython removes spaces and carriage returns only.
_WHITESPACE = b"\t\v\f\x1c\x1d\x1e\x1f"
_NUCLEOTIDES = b"ACGTUN"
_NUCLEOTIDE_SHARE, _NUCLEOTIDE_RECORDS, _NUCLEOTIDE_LETTERS = 0.95, 1_000, 50
_REASONS = (
    (NUL, b"\0"),
    ("'>' inside a line", b">"),
    ("'*' inside the sequence", b"*"),
    ("gap", b"-.~"),
    ("digit", b"0123456789"),
)


def read_fasta(path: Path, tally: Tally, *, allow_nucleotides: bool = False) -> Iterator[Record]:
    """Yields the records of a FASTA file, plain or gzip, in bounded memory.

    Letters are raised to capitals, white space and a terminal `*` are removed, J becomes X. A
    record that then holds anything but residues, nothing, or more than 100,000 residues is
    left out. All of this is counted in `tally`.

    Raises:
        InputDataError: the file is missing, empty, no FASTA, in UTF-16, damaged gzip, or (unless
            `allow_nucleotides`) reads like DNA or RNA.
    """
    with TextSource(path, "a FASTA file") as source:
        if source.has_mark:
            tally.change("byte order mark removed")
        lines = _Lines(path, source.text)
        records = _records(lines, tally)
        # The nucleotides of a file are found out before its first record is used.
        first = list(islice(records, _NUCLEOTIDE_RECORDS))
        if not lines.has_begun:
            raise InputDataError(f"{path}, line 1: the file is empty; a FASTA file begins with '>'")
        if not allow_nucleotides:
            _refuse_nucleotides(path, first)
        yield from chain(first, records)


def _records(lines: "_Lines", tally: Tally) -> Iterator[Record]:
    # An iterator, because the parser asks for one twice and goes on where it was.
    for title, letters in SimpleFastaParser(iter(lines)):
        heading = lines.headings.popleft()
        tally.records += 1
        header = _header(title, heading, tally)
        identifier = _identifier(header, heading.line, tally)
        if heading.is_too_long:
            tally.reject(_TOO_LONG, identifier, heading.line)
            continue
        sequence, reason = _residues(letters, tally)
        if reason:
            tally.reject(reason, identifier, heading.line)
        else:
            yield Record(identifier, header, sequence, heading.line)


@dataclass
class _Heading:
    """What is known of a record besides its header and its letters."""

    line: int
    rest_sha256: str = ""
    is_too_long: bool = False


_TOO_LONG = f"longer than {MAX_RESIDUES:,} residues"


class _Lines:
    """The lines of a FASTA file as Biopython's parser takes them, checked on the way.

    Long lines come in pieces, and what exceeds a header or a record is held back, so that memory
    stays bounded. The parser is one header ahead of the record it yields: `headings` queues what
    it does not tell.
    """

    def __init__(self, path: Path, text: TextIO) -> None:
        self._path, self._text = path, text
        self.headings: deque[_Heading] = deque()
        self.has_begun = False

    def __iter__(self) -> Iterator[str]:
        number, characters, is_continued = 0, 0, False
        for piece in iter(partial(self._text.readline, _PIECE), ""):
            # The space, which the parser removes, keeps a piece from passing for a header.
            line = f" {piece}" if is_continued else piece
            number += not is_continued
            is_continued = line[-1] != "\n"
            if line[0] == ">":
                heading = _Heading(number)
                self.headings.append(heading)
                self.has_begun, characters = True, 0
                if is_continued:
                    heading.rest_sha256 = self._skip_line()
                    is_continued = False
            elif line[0] == ";" or not self.has_begun:
                self._refuse(line, number)
                continue
            characters += len(line)
            if characters <= _MAX_CHARACTERS:
                yield line
            else:
                self.headings[-1].is_too_long = True

    def _skip_line(self) -> str:
        """Reads to the end of the line; the SHA-256 of what was there, or nothing."""
        digest, is_empty = hashlib.sha256(), True
        for piece in iter(partial(self._text.readline, _PIECE), ""):
            digest.update(piece.rstrip("\n").encode("utf-8", "surrogateescape"))
            is_empty = is_empty and piece == "\n"
            if piece[-1] == "\n":
                break
        return "" if is_empty else digest.hexdigest()

    def _refuse(self, line: str, number: int) -> None:
        """Names what stands where a header or residues ought to; blank lines may."""
        if line.isspace():
            return
        place = f"{self._path}, line {number}"
        if line[0] == ";":
            raise InputDataError(f"{place}: a ';' comment, which FASTA does not know; delete it")
        if line[0] == "@":
            raise InputDataError(f"{place}: this is FASTQ; a FASTA file begins with '>'")
        start = line[:40].rstrip().encode("utf-8", "backslashreplace").decode()
        raise InputDataError(
            f"{place}: {start!r} stands before the first header; a FASTA file begins with '>'"
        )


def _header(title: str, heading: _Heading, tally: Tally) -> str:
    """The header as text that any UTF-8 file can hold."""
    if heading.rest_sha256:
        tally.change("header shortened")
        # The hash follows without a space: an identifier that was cut stays unlike the others.
        title += f"~sha256:{heading.rest_sha256}"
    if title.isascii():
        return title
    header = title.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    if header != title:
        tally.change("header bytes that are no UTF-8 escaped")
    return header


def _identifier(header: str, line: int, tally: Tally) -> str:
    """The accession of a UniProt header, or the first word of another."""
    if match := _UNIPROT.match(header):
        return match[1]
    words = header.split(maxsplit=1)
    if words:
        return words[0]
    tally.change("bare '>' named by its line")
    return f"line:{line}"


def _residues(letters: str, tally: Tally) -> tuple[str, str]:
    """The sequence, or the reason why the record is left out."""
    if not letters.isascii():
        return "", "letter that is not ASCII"
    sequence, reason = letters.encode(), ""
    if sequence.translate(None, _STANDARD):
        sequence, reason = _mended(sequence, tally)
    if reason:
        return "", reason
    if not sequence:
        return "", "blank sequence"
    if len(sequence) > MAX_RESIDUES:
        return "", _TOO_LONG
    if not sequence.strip(_NUCLEOTIDES):
        tally.note("record of the letters ACGTUN alone")
    return sequence.decode(), ""


def _mended(letters: bytes, tally: Tally) -> tuple[bytes, str]:
    """Residues out of letters that are not all standard, or the reason why that cannot be."""
    given = letters.translate(None, _WHITESPACE)
    capitals = given.upper()
    sequence = capitals.rstrip(b"*")
    if foreign := sequence.translate(None, _RESIDUES + b"J"):
        found = set(foreign)
        return b"", next(
            (reason for reason, kind in _REASONS if found & set(kind)),
            "character that is no letter",
        )
    if not sequence:
        return b"", "blank sequence"
    if capitals != given:
        tally.change("lower case raised")
    if sequence != capitals:
        tally.change("terminal '*' removed")
    if b"J" in sequence:
        tally.change("J written as X")
    if sequence.translate(None, _STANDARD + b"J"):
        tally.note("record with B, O, U, X or Z")
    return sequence.replace(b"J", b"X"), ""


def _refuse_nucleotides(path: Path, records: list[Record]) -> None:
    letters = "".join(record.sequence for record in records).encode()
    num_others = len(letters.translate(None, _NUCLEOTIDES))
    share = 1 - num_others / max(len(letters), 1)
    if len(letters) >= _NUCLEOTIDE_LETTERS and share >= _NUCLEOTIDE_SHARE:
        raise InputDataError(
            f"{path}: {share:.0%} of the letters of the first {len(records):,} records are ACGTUN: "
            "this looks like DNA or RNA; translate it first "
            "(only protlm prepare takes --allow-nucleotides)"
        )
