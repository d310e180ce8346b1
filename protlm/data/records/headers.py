"""What a FASTA header tells: the identifier, and in UniProt's headers the organism."""

import hashlib
import re

from protlm.data.records.tally import Tally

# The longest header that is kept.
MAX_HEADER = 1 << 16

# A header of UniProt, whose group 1 is the accession.
UNIPROT = re.compile(r"(?:sp|tr)\|([^|\s]+)\|")
# What only those headers have that tell an organism: UniProt's, and UniRef's of a cluster.
ORIGIN_SIGNS = (" OS=", " Tax=")
_TAXON = re.compile(r" OX=(\d{1,18})(?!\S)")
_UNIREF = re.compile(r"UniRef\d+_\S+ (.*) n=\d+ Tax=(.*?)(?: TaxID=(\d{1,18}))?(?: RepID=\S*)?$")
_NEXT_KEY = re.compile(r" [A-Z]{2}=")
_FRAGMENT = re.compile(r"\(Fragments?\)")


def identifier_of(header: str, line: int, tally: Tally) -> str:
    """The accession of a UniProt header, or the first word of another."""
    if match := UNIPROT.match(header):
        return match[1]
    words = header.split(maxsplit=1)
    if words:
        return words[0]
    tally.change("bare '>' named by its line")
    return f"line:{line}"


def origin_of(header: str) -> tuple[int | None, bool | None, str | None]:
    """Taxon, whether it is a fragment, and organism, where the header is UniProt's or UniRef's.

    UniRef's taxon is the lowest one that all members of the cluster have in common.

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


def storable(title: str, tally: Tally) -> str:
    """The header as text that any UTF-8 file can hold, of at most some 64 KiB."""
    if len(title) > MAX_HEADER:
        tally.change("header shortened")
        rest = title[MAX_HEADER:].encode("utf-8", "surrogateescape")
        # The hash follows without a space: an identifier that was cut stays unlike the others.
        title = f"{title[:MAX_HEADER]}~sha256:{hashlib.sha256(rest).hexdigest()}"
    header = title.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    if header != title:
        tally.change("header bytes that are no UTF-8 escaped")
    return header
