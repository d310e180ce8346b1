"""UniProt XML, parsed by lxml entry by entry, without access to anything outside the file."""

import re
from collections.abc import Iterator
from io import BytesIO
from typing import Any, ClassVar, final

# lxml comes without types.
from lxml import etree  # pyright: ignore[reportAttributeAccessIssue]

from protlm.data.records.block import Block, RecordFormat
from protlm.data.records.record import Feature, Record, Tally, residues
from protlm.data.records.swissprot import WRONG_LENGTH
from protlm.options.prepare import ReadOptions
from protlm.system.errors import InputDataError

# TrEMBL and Swiss-Prot have entries of some megabytes.
_MAX_ENTRY = 64 << 20
# What precedes the root's start tag, or a document type: instructions and comments.
_PROLOG = re.compile(rb"(?:\s|<\?.*?(?:\?>|\Z)|<!--.*?(?:-->|\Z))*+", re.DOTALL)
_ROOT = re.compile(rb"<((?:[\w.-]+:)?)([\w.-]+)((?:[^<>\"']|\"[^\"<]*\"|'[^'<]*')*)>")
_ENCODING = re.compile(rb"<\?xml[^>]*\bencoding\s*=\s*[\"']([^\"']*)")
_ACCESSION = re.compile(rb"<(?:[\w.-]+:)?accession[^<>]*>\s*([^\s<]+)")
_REFUSED = {
    b"uniref": "UniRef's XML; take UniRef's FASTA file",
    b"uniparc": "UniParc's XML; take UniParc's FASTA file",
    b"html": "a web page, not the requested file; download the file again",
}
# No entities and no other files: an XML file must not cause other files to be read.
_SAFE: dict[str, Any] = {
    "resolve_entities": False,
    "no_network": True,
    "load_dtd": False,
    "huge_tree": False,
    # A comment would split the surrounding text.
    "remove_comments": True,
    "remove_pis": True,
}
_POSITION = re.compile(r"[1-9]\d{0,8}", re.ASCII)
_TAXON = re.compile(r"\d{1,18}", re.ASCII)
# Above this line number, libxml2 reports the line of the first node inside an entry.
_MAX_KNOWN_LINE = 65_535


@final
class XmlBlock(Block):
    """A block of records that are `entry` elements."""

    format: ClassVar[str] = "xml"

    def _records(self, data: bytes, tally: Tally) -> Iterator[Record]:
        layout, accession, before = self.layout, "", tally.records
        tail = b"" if self.is_last and not self.is_cut else layout.tail
        # The data continue in the line in which the head ends.
        line = self.line - 1 - layout.head.count(b"\n")
        try:
            for entry in _entries(layout.head + data + tail):
                tally.records += 1
                accession = _accession(entry)
                letters, reason = _sequence(entry, tally, self.options)
                place = line + _line(entry)
                if reason:
                    self._reject(tally, reason, accession or f"line:{place}", place)
                else:
                    features = _features(entry) if self.options.features else None
                    yield Record(
                        accession, _header(entry), letters, place, *_origin(entry), features
                    )
        except etree.XMLSyntaxError as error:
            last = accession or self._identify(data)[0]
            # lxml reports the position in the block, and its message may quote any text.
            what = (error.msg or "").partition(", line ")[0].partition("\n")[0]
            raise InputDataError(
                f"{self.source}, line {line + (error.lineno or 1)}: the XML is damaged or ends "
                f"prematurely, near accession {last or '(none)'} ({what!a}); download the file "
                "again"
            ) from None
        if self.is_whole and tally.records == before:
            raise InputDataError(f"{self.source}: the file has no entry")

    def _identify(self, record: bytes) -> tuple[str, str]:
        found = _ACCESSION.search(record)
        reason = f"entry of more than {self.layout.max_record:,} bytes"
        return found[1].decode("utf-8", "backslashreplace") if found else "", reason


def xml_layout(start: bytes, source: str) -> RecordFormat | None:
    """Returns the structure of a UniProt XML file, or None if the file has another format."""
    if not start.startswith(b"<"):
        return None
    before = _PROLOG.match(start)
    place = before.end() if before else 0
    root = _ROOT.match(start, place)
    if start[place:].lower().startswith(b"<!doctype html"):
        raise InputDataError(f"{source}, line 1: this is {_REFUSED[b'html']}")
    if start.startswith(b"<!", place):
        raise InputDataError(
            f"{source}: the XML declares a document type, which UniProt's files do not and which "
            "could make a program read other files; download the file from uniprot.org"
        )
    if root is None:
        raise InputDataError(f"{source}, line 1: this is neither UniProt XML nor a web page")
    prefix, name, attributes = root.groups()
    if name != b"uniprot":
        what = _REFUSED.get(
            name.lower().rstrip(b"0159"), f"XML of <{name.decode()}>, not of UniProt"
        )
        raise InputDataError(f"{source}, line 1: this is {what}")
    encoding = _ENCODING.match(start)
    if encoding and encoding[1].upper() not in {b"UTF-8", b"ASCII", b"US-ASCII"}:
        raise InputDataError(
            f"{source}, line 1: the XML is in {encoding[1].decode(errors='replace')!r:.40}; "
            "UniProt's is in UTF-8"
        )
    if attributes.endswith(b"/"):
        raise InputDataError(f"{source}: the file has no entry")
    return RecordFormat(
        XmlBlock,
        marker=b"<" + prefix + b"entry",
        max_record=_MAX_ENTRY,
        num_skipped=root.end(),
        head=root[0],
        tail=b"</" + prefix + b"uniprot>",
    )


def _entries(document: bytes) -> Iterator[Any]:
    for _, entry in etree.iterparse(BytesIO(document), events=("end",), tag="{*}entry", **_SAFE):
        yield entry
        # Processed entries are removed, so that the document is never complete in memory.
        entry.clear()
        while (before := entry.getprevious()) is not None:
            entry.getparent().remove(before)


def _line(entry: Any) -> int:
    if entry.sourceline < _MAX_KNOWN_LINE:
        return entry.sourceline
    return entry.sourceline - (entry.text or "").count("\n")


def _child(entry: Any, name: str, *, from_end: bool = False) -> Any:
    return next(entry.iterchildren("{*}" + name, reversed=from_end), None)


def _text(entry: Any, name: str) -> str:
    child = _child(entry, name)
    return " ".join((child.text or "").split()) if child is not None else ""


def _accession(entry: Any) -> str:
    """Returns the first accession, or an empty string if it is not a single word."""
    words = _text(entry, "accession").split()
    return words[0] if len(words) == 1 else ""


def _sequence(entry: Any, tally: Tally, options: ReadOptions) -> tuple[str, str]:
    if not _accession(entry):
        return "", "no accession"
    sequence = _child(entry, "sequence", from_end=True)
    if sequence is None:
        return "", "no sequence"
    text = sequence.text or ""
    # White space that is not ASCII is kept, and later rejected.
    letters = "".join(text.split()) if text.isascii() else text
    if sequence.get("length") != str(len(letters)):
        return "", WRONG_LENGTH
    return residues(letters, tally, options)


def _header(entry: Any) -> str:
    database = "sp" if entry.get("dataset") == "Swiss-Prot" else "tr"
    return f"{database}|{_accession(entry)}|{_text(entry, 'name')}"


def _origin(entry: Any) -> tuple[int | None, bool, str | None]:
    taxon, name = None, None
    organism = _child(entry, "organism")
    for child in organism if organism is not None else ():
        if child.get("type") == "scientific":
            name = child.text
        elif child.get("type") == "NCBI Taxonomy" and _TAXON.fullmatch(child.get("id", "")):
            taxon = int(child.get("id"))
    is_fragment = _child(entry, "sequence", from_end=True).get("fragment") is not None
    return taxon, is_fragment, name


def _features(entry: Any) -> tuple[Feature, ...]:
    """Returns the features; those of another isoform name its sequence."""
    features = []
    for feature in entry.iterchildren("{*}feature"):
        location = _child(feature, "location")
        on_isoform = location is not None and location.get("sequence") is not None
        is_here = location is not None and not on_isoform
        first, last = (_position(location, x) if is_here else None for x in ("begin", "end"))
        ligand = _child(feature, "ligand")
        note = feature.get("description", "") if ligand is None else _text(ligand, "name")
        features.append(Feature(feature.get("type", ""), first, last, on_isoform, note))
    return tuple(features)


def _position(location: Any, name: str) -> int | None:
    """Returns the first or last position, which are written as one if they are equal."""
    place = _child(location, name)
    if place is None:
        place = _child(location, "position")
    if place is None or place.get("status", "certain") != "certain":
        return None
    text = place.get("position", "")
    return int(text) - 1 if _POSITION.fullmatch(text) else None
