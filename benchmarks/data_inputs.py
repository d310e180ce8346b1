"""Writes large sequence files by repeating real entries."""

import re
from pathlib import Path

from protlm.data.records.source import ByteSource

FIXTURES = Path(__file__).resolve().parent.parent / "tests" / "data" / "records" / "fixtures"
# Entries of many formats and ages; the tests read the same files.
_FLAT_FILES = ("emboss_swissprot_100", "multi_ex", "P60904", "Q13639", "P0CK95", "P39896")
_XML_FILES = ("multi_ex", "P62330", "Q13639", "R5HY77", "H2CNN8")
_XML_START = b"""<?xml version='1.0' encoding='UTF-8'?>
<uniprot xmlns="http://uniprot.org/uniprot">
"""
_XML_END = b"</uniprot>\n"


def write_flat_file(path: Path, num_bytes: int) -> None:
    """Writes a Swiss-Prot flat file of at least a given number of bytes, packed with gzip."""
    entries = b"".join(_unpacked(FIXTURES / f"{name}.dat.gz") for name in _FLAT_FILES)
    _write(path, entries * (num_bytes // len(entries) + 1))


def write_xml(path: Path, num_bytes: int) -> None:
    """Writes a UniProt XML file of at least a given number of bytes, packed with gzip."""
    texts = [_unpacked(FIXTURES / f"{name}.xml.gz") for name in _XML_FILES]
    entries = b"\n".join(
        entry for text in texts for entry in re.findall(rb"<entry .*?</entry>", text, re.DOTALL)
    )
    _write(path, _XML_START + (entries + b"\n") * (num_bytes // len(entries) + 1) + _XML_END)


def _unpacked(path: Path) -> bytes:
    with ByteSource(path, "a sequence file") as source:
        return b"".join(source.blocks())


def _write(path: Path, text: bytes) -> None:
    from isal import igzip

    with igzip.IGzipFile(path, "wb") as file:
        file.write(text)
