"""FASTA records, read by Biopython's parser with additional checks and counts; their headers."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from itertools import islice, repeat
from typing import ClassVar, NoReturn, TypeAlias, final

import numpy as np
from Bio.SeqIO.FastaIO import SimpleFastaParser

from protlm.data.records.block import Block, RecordFormat
from protlm.data.records.format_detection import (
    A3M,
    ALIGNMENT,
    SECOND,
    annotation,
    foreign_format,
    refusal,
)
from protlm.data.records.record import TOO_LONG, Record, Tally, are_standard, residues
from protlm.options.prepare import ReadOptions
from protlm.system.errors import InputDataError

# Records checked together; a single unusual record sends all of them down the slow path.
_BATCH = 32
# The line number of a record, and its header and letters.
_Numbered: TypeAlias = tuple[int, tuple[str, str]]
_COMMENT = re.compile(rb"^[;#!].*", re.MULTILINE)
# MMseqs2 ends each alignment with a NUL byte.
_NUL = re.compile(rb"^\0(?=[>#]|\s*\Z)", re.MULTILINE)
# Records that HH-suite puts before the proteins of an alignment.
_ANNOTATION = re.compile(rb"^>(?:ss|sa|aa|bb)_(?:pred|conf|dssp)\b.*(?:\n(?!>).*)*", re.MULTILINE)
ANNOTATION = "annotation of HH-suite (ss_pred, ss_conf, ss_dssp)"
# The longest header that is kept.
MAX_HEADER = 1 << 16

# A header of UniProt, whose group 1 is the accession.
UNIPROT = re.compile(r"(?:sp|tr)\|([^|\s]+)\|")
# Text that only headers with an organism contain: those of UniProt, and of UniRef clusters.
ORIGIN_SIGNS = (" OS=", " Tax=")
_TAXON = re.compile(r" OX=(\d{1,18})(?!\S)")
_UNIREF = re.compile(r"UniRef\d+_\S+ (.*) n=\d+ Tax=(.*?)(?: TaxID=(\d{1,18}))?(?: RepID=\S*)?$")
_NEXT_KEY = re.compile(r" [A-Z]{2}=")
_FRAGMENT = re.compile(r"\(Fragments?\)")


@final
class FastaBlock(Block):
    """Records that begin with `>`."""

    format: ClassVar[str] = "fasta"

    def _records(self, data: bytes, tally: Tally) -> Iterator[Record]:
        data = self._checked(self._of_one_alignment(data, tally) if self.options.rows else data)
        # The parser does not return line numbers.
        begins = _header_lines(data, self.line)
        # It cannot handle empty strings, so blank lines are left out. It strips Unicode white space
        # at the ends of lines, which must be rejected; decoding to ASCII keeps it as surrogates.
        lines = filter(None, data.decode("ascii", "surrogateescape").split("\n"))
        numbered = zip(begins, SimpleFastaParser(lines), strict=True)
        while some := list(islice(numbered, _BATCH)):
            tally.records += len(some)
            yield from self._usual(some, tally) or self._one_by_one(some, tally)

    def _usual(self, some: Sequence[_Numbered], tally: Tally) -> list[Record]:
        """Converts records together if all need only an identifier; otherwise returns none."""
        numbers, pairs = zip(*some, strict=True)
        titles, letters = zip(*pairs, strict=True)
        text = "".join(titles)
        is_usual = (
            text.isascii()
            and max(map(len, titles)) <= MAX_HEADER
            and not (self.options.origins and _may_tell_origin(text))
            and are_standard(letters)
        )
        if not is_usual:
            return []
        identifiers = [
            found[1] if found else identifier_of(title, number, tally)
            for title, number, found in zip(
                titles, numbers, map(UNIPROT.match, titles), strict=True
            )
        ]
        unknown = [repeat(None)] * (len(Record._fields) - 4)
        fields = zip(identifiers, titles, letters, numbers, *unknown, strict=False)
        # Equivalent to `Record(...)`, three times as fast.
        return [tuple.__new__(Record, values) for values in fields]

    def _one_by_one(self, some: Sequence[_Numbered], tally: Tally) -> Iterator[Record]:
        for line, (title, letters) in some:
            is_usual = title.isascii() and len(title) <= MAX_HEADER
            header = title if is_usual else sanitize_header(_as_utf8(title), tally)
            identifier = identifier_of(header, line, tally)
            sequence, reason = residues(letters, tally, self.options)
            if reason:
                self._reject(tally, reason, identifier, line)
            elif self.options.origins and _may_tell_origin(header):
                yield Record(identifier, header, sequence, line, *origin_of(header))
            else:
                row = letters if self.options.rows else None
                yield Record(identifier, header, sequence, line, row=row)

    def _identify(self, record: bytes) -> tuple[str, str]:
        title, line_end, _ = record[1:].partition(b"\n")
        header = sanitize_header(title.decode("utf-8", "surrogateescape"), Tally())
        reason = TOO_LONG if line_end else f"header of more than {self.layout.max_record:,} bytes"
        return identifier_of(header, 0, Tally()), reason

    def _of_one_alignment(self, data: bytes, tally: Tally) -> bytes:
        """Returns the data without records of annotation; refuses a second alignment."""
        starts = (found.start() for found in ALIGNMENT.finditer(data))
        begins = [start for start in starts if start or not self.is_first]
        # The byte that ends the last alignment may be there.
        ends = [found.start() for found in _NUL.finditer(data)]
        begins += [end for end in ends if data[end:].strip(b"\0\n") or not self.is_last]
        if begins:
            self._refuse(data, min(begins), SECOND)
        kept, number = _ANNOTATION.subn(lambda found: b"\n" * found[0].count(b"\n"), data)
        tally.records += number
        if number:
            tally.filtered[ANNOTATION] += number
        return kept

    def _checked(self, data: bytes) -> bytes:
        """Returns the data without allowed comments; rejects anything before the first record."""
        if self.options.allow_gaps:
            data = _NUL.sub(b"", data)
        elif b"\0" in data and (found := _NUL.search(data)):
            self._refuse(data, found.start(), A3M)
        if self.options.allow_gaps or self.options.allow_comments:
            for found in ALIGNMENT.finditer(data):
                if found[1]:
                    self._refuse(data, found.start())
            data = ALIGNMENT.sub(b"", data)
        if self.options.allow_comments:
            data = _COMMENT.sub(b"", data)
        # Searching for one byte is much faster, so it is done first.
        elif b";" in data and (line_end := data.find(b"\n;")) >= 0:
            self._refuse(data, line_end + 1)
        records = data.lstrip()
        begin = len(data) - len(records)
        if records and not records.startswith(b">"):
            self._refuse(data, begin)
        if not records and self.is_whole:
            raise InputDataError(f"{self.source}: the file contains comments, and no record")
        allowed = self.options.allow_nucleotides
        if self.is_first and (what := annotation(records, allow_nucleotides=allowed)):
            raise refusal(self.source, what)
        # The parser ignores a header that follows white space.
        return b"\n" * data.count(b"\n", 0, begin) + records

    def _refuse(self, data: bytes, position: int, what: str = "") -> NoReturn:
        line = self.line + data.count(b"\n", 0, position)
        what = what or foreign_format(data[position:])
        raise refusal(f"{self.source}, line {line}", what)


def _may_tell_origin(text: str) -> bool:
    return any(sign in text for sign in ORIGIN_SIGNS)


def _as_utf8(title: str) -> str:
    """Decodes a header, which was decoded as ASCII with surrogates, as UTF-8."""
    return title.encode("ascii", "surrogateescape").decode("utf-8", "surrogateescape")


def _header_lines(data: bytes, first: int) -> list[int]:
    """Returns the numbers of the lines that begin with `>`; the first line has number `first`."""
    letters = np.frombuffer(data, np.uint8)
    line_ends = np.flatnonzero(letters[:-1] == ord("\n"))
    begins = np.flatnonzero(letters[line_ends + 1] == ord(">")) + (first + 1)
    at_start = [first] if data.startswith(b">") else []
    return at_start + begins.tolist()


def fasta_layout(start: bytes, options: ReadOptions) -> RecordFormat | None:
    """Returns the structure of a FASTA file, or None if the file has another format."""
    is_alignment = options.allow_gaps and ALIGNMENT.match(start)
    signs = (b">", b";", b"#", b"!") if options.allow_comments else (b">",)
    if not start.startswith(signs) and not is_alignment:
        return None
    return RecordFormat(FastaBlock, marker=b"\n>", max_record=4 << 20)


def identifier_of(header: str, line: int, tally: Tally) -> str:
    """Returns the accession of a UniProt header, or the first word of another header."""
    if match := UNIPROT.match(header):
        return match[1]
    words = header.split(maxsplit=1)
    if words:
        return words[0]
    tally.changed["bare '>' named by its line"] += 1
    return f"line:{line}"


def origin_of(header: str) -> tuple[int | None, bool | None, str | None]:
    """Returns taxon, fragment status and organism of a UniProt or UniRef header.

    The taxon of UniRef is the lowest common taxon of the cluster's members.

    >>> origin_of("sp|P1|P1_X Actin (Fragment) OS=Homo sapiens OX=9606 PE=1 SV=1")
    (9606, True, 'Homo sapiens')
    >>> origin_of("UniRef50_P1 Actin n=2 Tax=Homo sapiens TaxID=9606 RepID=P1_X")
    (9606, False, 'Homo sapiens')
    >>> origin_of("P1 Actin")
    (None, None, None)
    """
    if match := _UNIREF.match(header):
        name, organism, taxon = match.groups()
        return int(taxon) if taxon else None, _FRAGMENT.search(name) is not None, organism
    begin = header.find(" OS=")
    if begin < 0:
        return None, None, None
    is_fragment = _FRAGMENT.search(header, 0, begin) is not None
    end = _NEXT_KEY.search(header, begin + 4)
    organism = header[begin + 4 : end.start() if end else None]
    taxon = _TAXON.match(header, end.start()) if end else None
    return int(taxon[1]) if taxon else None, is_fragment, organism


def sanitize_header(title: str, tally: Tally) -> str:
    """Converts a header to valid UTF-8 of at most about 64 KiB."""
    if len(title) > MAX_HEADER:
        tally.changed["header shortened"] += 1
        rest = title[MAX_HEADER:].encode("utf-8", "surrogateescape")
        # The hash follows without a space, so that truncated identifiers remain distinct.
        title = f"{title[:MAX_HEADER]}~sha256:{hashlib.sha256(rest).hexdigest()}"
    header = title.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    if header != title:
        tally.changed["header bytes that are not UTF-8 escaped"] += 1
    return header
