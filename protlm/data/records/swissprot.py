"""Swiss-Prot and TrEMBL flat files (.dat), scanned for the few lines that are needed."""

import re
from collections.abc import Iterator
from typing import ClassVar, final

from protlm.data.records.block import Block, RecordFormat
from protlm.data.records.record import Feature, Record, Tally, residues
from protlm.options.prepare import ReadOptions

NO_END = "no '//' at the end"
WRONG_LENGTH = "length differs from the one that the entry declares"

_START = b"ID   "
_ID = re.compile(rb"(\S+) +(\w+); +(?:PRT; +)?(\d{1,18}) AA\.?\n")
_ACCESSION = re.compile(rb"\nAC   ([^\s;]+);[ \n]")
_ORGANISM = re.compile(rb"\nOS   (.*(?:\nOS   .*)*)")
_TAXON = re.compile(rb"\nOX   NCBI_TaxID=(\d{1,18})")
_FRAGMENT = re.compile(rb"\nDE   .*(?:Flags:.*\bFragments?;|\(Fragments?\))")
_LENGTH = re.compile(rb"\nSQ   SEQUENCE +(\d{1,18}) AA;.*")
# The first line of residues, or the end of an entry without residues.
_BODY_END = re.compile(rb"\n(?:  |//)")
_FEATURE = re.compile(rb"\nFT   (\S+) +(\S+)(.*)((?:\nFT {6}.*)*)")
_NOTE = re.compile(rb'/(?:ligand|note)="([^"]*)"')
_POSITION = re.compile(rb"[1-9]\d{0,8}")
_DATABASES = {b"Reviewed": "sp", b"STANDARD": "sp"}


@final
class SwissProtBlock(Block):
    """A block of records from a line `ID` to a line `//`."""

    format: ClassVar[str] = "swissprot"

    def _records(self, data: bytes, tally: Tally) -> Iterator[Record]:
        line = self.line
        for entry in data.removeprefix(_START).split(self.layout.marker) if data else ():
            tally.records += 1
            sequence, reason = _sequence(entry, tally, self.options)
            if reason:
                self._reject(tally, reason, _name(entry) or f"line:{line}", line)
            else:
                features = _features(entry) if self.options.features else None
                yield Record(
                    _name(entry), _header(entry), sequence, line, *_origin(entry), features
                )
            line += entry.count(b"\n") + 1

    def _identify(self, record: bytes) -> tuple[str, str]:
        reason = f"entry of more than {self.layout.max_record:,} bytes"
        return _name(record.removeprefix(_START)), reason


def swissprot_layout(start: bytes) -> RecordFormat | None:
    """Returns the structure of a flat file, or None if the file has another format."""
    if not start.startswith(_START) or b" AA" not in start.partition(b"\n")[0]:
        return None
    return RecordFormat(SwissProtBlock, marker=b"\n" + _START, max_record=16 << 20)


def _sequence(entry: bytes, tally: Tally, options: ReadOptions) -> tuple[str, str]:
    """Returns the sequence, or an empty string and the reason for rejection."""
    declared = _ID.match(entry)
    if declared is None:
        return "", "no ID line in UniProt's format"
    if not _ACCESSION.search(entry):
        return "", "no accession"
    first = _BODY_END.search(entry)
    end = entry.find(b"\n//", first.start()) if first else -1
    if first is None or end < 0:
        return "", NO_END
    if entry[end + len("\n//") :].strip():
        return "", "text after the '//'"
    length = _LENGTH.match(entry, entry.rfind(b"\n", 0, first.start()))
    lines = entry[first.start() : end]
    if length is None or lines.count(b"\n") != lines.count(b"\n     "):
        return "", "residues without a preceding SQ line"
    letters = lines.translate(None, b" \n")
    if not int(declared[3]) == int(length[1]) == len(letters):
        return "", WRONG_LENGTH
    return residues(letters.decode("latin-1"), tally, options)


def _name(entry: bytes) -> str:
    """Returns the primary accession, or the name of an entry without one."""
    found = _ACCESSION.search(entry) or _ID.match(entry)
    return found[1].decode("utf-8", "backslashreplace") if found else ""


def _header(entry: bytes) -> str:
    """Returns the beginning of the header in UniProt's FASTA files."""
    found = _ID.match(entry)
    name, status = found.group(1, 2) if found else (b"", b"")
    return (
        f"{_DATABASES.get(status, 'tr')}|{_name(entry)}|{name.decode('utf-8', 'backslashreplace')}"
    )


def _origin(entry: bytes) -> tuple[int | None, bool, str | None]:
    organism, taxon = _ORGANISM.search(entry), _TAXON.search(entry)
    name, end = None, len(entry)
    if organism:
        text = organism[1].replace(b"\nOS   ", b" ").decode("utf-8", "backslashreplace")
        # The description precedes the organism.
        name, end = text.rstrip().removesuffix("."), organism.start()
    return int(taxon[1]) if taxon else None, _FRAGMENT.search(entry, 0, end) is not None, name


def _features(entry: bytes) -> tuple[Feature, ...]:
    """Returns the features: `BINDING 52`, `CHAIN 27..700`, or before 2019 `CHAIN 27 700 Note`.

    Locations of another isoform begin with its name: `VARIANT P12345-2:47`.
    """
    features = []
    for kind, location, rest, lines in _FEATURE.findall(entry):
        first, is_range, last = location.partition(b"..")
        last = last if is_range else next(iter(rest.split()), first)
        name = kind.decode("utf-8", "backslashreplace")
        if b":" in location:
            features.append(Feature(name, None, None, on_isoform=True))
        else:
            words = _NOTE.search(re.sub(rb"\nFT +", b" ", lines))
            note = words[1].decode("utf-8", "backslashreplace") if words else ""
            features.append(Feature(name, _position(first), _position(last), note=note))
    return tuple(features)


def _position(text: bytes) -> int | None:
    return int(text) - 1 if _POSITION.fullmatch(text) else None
