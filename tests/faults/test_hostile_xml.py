"""XML that defines entities, references other files, is truncated, or has another schema."""

import gzip
from pathlib import Path

import pytest

FIXTURES = Path(__file__).resolve().parents[1] / "data" / "records" / "fixtures"
XML = gzip.decompress((FIXTURES / "multi_ex.xml.gz").read_bytes())
ROOT = XML.index(b"<uniprot")
LOLS = b"".join(
    b'<!ENTITY l%d "%s">' % (level, b"&l%d;" % (level - 1) * 10) for level in range(1, 10)
)
BOMB = b'<!DOCTYPE uniprot [<!ENTITY l0 "lol">' + LOLS + b"]>"


@pytest.mark.parametrize("place", ["before the root", "behind it"])
@pytest.mark.parametrize(
    "declaration",
    [
        BOMB,
        b'<!DOCTYPE uniprot [<!ENTITY l9 SYSTEM "file://%s">]>',
        b'<!DOCTYPE uniprot [<!ENTITY l9 SYSTEM "http://example.org/x">]>',
        b'<!DOCTYPE uniprot SYSTEM "http://example.org/uniprot.dtd">',
    ],
    ids=["bomb", "file", "network", "dtd"],
)
def test_declarations_are_refused_and_nothing_else_is_read(
    refuse_bytes, tmp_path_factory, declaration, place
):
    secret = tmp_path_factory.mktemp("secret") / "secret.txt"
    secret.write_text("SECRET")
    if b"%s" in declaration:
        declaration %= str(secret).encode()
    content = XML[ROOT:].replace(b"<name>", b"<name>&l9;", 1)
    if place == "before the root":
        content = b'<?xml version="1.0"?>' + declaration + content
    else:
        content = content.replace(b"<entry ", declaration + b"<entry ", 1)
    message = refuse_bytes(content)
    assert "declares a document type" in message or "the XML is damaged" in message
    assert "SECRET" not in message


def test_a_truncated_file_is_refused_with_its_last_accession(refuse_bytes):
    message = refuse_bytes(XML[: XML.index(b"</entry>", len(XML) // 2)])
    assert "ends prematurely, near accession P" in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b'<UniRef90 xmlns="http://uniprot.org/uniref">',
            "this is UniRef's XML; take UniRef's FASTA",
        ),
        (
            b'<uniparc xmlns="http://uniprot.org/uniparc">',
            "this is UniParc's XML; take UniParc's FASTA",
        ),
    ],
)
def test_other_schemas_are_refused_by_name(refuse_bytes, content, message):
    assert message in refuse_bytes(b'<?xml version="1.0"?>\n' + content)
