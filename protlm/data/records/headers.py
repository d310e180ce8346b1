"""Parsing of FASTA headers: identifiers, and organisms in UniProt headers."""

import hashlib
import re

from protlm.data.records.tally import Tally

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


def identifier_of(header: str, line: int, tally: Tally) -> str:
    """Returns the accession of a UniProt header, or the first word of another header."""
    if match := UNIPROT.match(header):
        return match[1]
    words = header.split(maxsplit=1)
    if words:
        return words[0]
    tally.change("bare '>' named by its line")
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
        tally.change("header shortened")
        rest = title[MAX_HEADER:].encode("utf-8", "surrogateescape")
        # The hash follows without a space, so that truncated identifiers remain distinct.
        title = f"{title[:MAX_HEADER]}~sha256:{hashlib.sha256(rest).hexdigest()}"
    header = title.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    if header != title:
        tally.change("header bytes that are not UTF-8 escaped")
    return header
