"""UniProt XML: against Biopython's parser on real entries; refused, damaged and hostile files."""

import gzip
import io
import random
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from Bio import SeqIO

from protlm.data.records import SequenceFile, Tally
from protlm.data.records.uniprot_xml import _entries
from protlm.system.errors import InputDataError

FIXTURES = Path(__file__).resolve().parent / "fixtures"
FILES = sorted(FIXTURES.glob("*.xml.gz"))
SEVERAL = gzip.decompress((FIXTURES / "multi_ex.xml.gz").read_bytes())
ONE = gzip.decompress((FIXTURES / "P84001.xml.gz").read_bytes())


def by_biopython(content: bytes) -> list[tuple[str, str]]:
    entries = SeqIO.parse(io.BytesIO(content), "uniprot-xml")
    return [(entry.id, str(entry.seq)) for entry in entries]


def found(records):
    return [(record.identifier, record.sequence) for record in records]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_real_entries_match_biopython(read_path, path):
    content = gzip.decompress(path.read_bytes())
    records, tally = read_path(path)
    assert found(records) == by_biopython(content)
    assert tally.records == len(records)
    lines = content.decode().splitlines()
    assert all(lines[record.line - 1].lstrip().startswith("<entry ") for record in records)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_features_match_biopython(read_path, feature_of, path):
    records, _ = read_path(path, features=True)
    entries = SeqIO.parse(io.BytesIO(gzip.decompress(path.read_bytes())), "uniprot-xml")
    for record, entry in zip(records, entries, strict=True):
        assert list(record.features) == list(map(feature_of, entry.features))


def test_features_of_another_isoform_or_without_a_place_have_no_positions(read):
    content = re.sub(rb"<location>(\s*<begin)", rb'<location sequence="P1-2">\1', SEVERAL, count=1)
    content = re.sub(rb"<begin .*?/>", b'<begin position="x"/>', content)
    changed, plain = (read(x, features=True)[0][0].features for x in (content, SEVERAL))
    assert changed[0] == (plain[0].kind, None, None, True) != plain[0]
    for found, expected in list(zip(changed, plain, strict=True))[1:]:
        is_one = expected.first == expected.last
        assert found == expected._replace(first=expected.first if is_one else None)


def test_the_formats_agree_on_the_same_proteins(read_path):
    flat, xml, fasta = (
        read_path(FIXTURES / f"multi_ex.{name}.gz")[0] for name in ("dat", "xml", "fasta")
    )
    assert len(flat) == 8
    for one, other in zip(flat, xml, strict=True):
        assert one._replace(line=0, organism=None) == other._replace(line=0, organism=None)
        # In flat files other names follow in parentheses.
        assert f"{one.organism} (".startswith(f"{other.organism} (")
    for one, other in zip(xml, fasta, strict=True):
        assert other.header.startswith(one.header)
        assert (one.identifier, one.sequence) == (other.identifier, other.sequence)
        assert (one.is_fragment, one.organism) == (other.is_fragment, other.organism)
    assert {record.is_fragment for record in xml} == {True, False}


def test_both_namespaces_prefixes_and_one_line_are_read(read):
    expected, _ = read(SEVERAL)
    for content in (
        SEVERAL.replace(b'"http://uniprot.org', b'"https://uniprot.org'),
        prefixed(SEVERAL),
        SEVERAL.replace(b"\n", b" "),
        b"\xef\xbb\xbf" + SEVERAL,
        SEVERAL.replace(b"<uniprot ", b"<!-- > <uniprot> -->\n<?who cares?>\n<uniprot\n", 1),
    ):
        assert found(read(content)[0]) == found(expected)


def prefixed(content: bytes) -> bytes:
    """The document as ElementTree would write it again."""
    return ElementTree.tostring(ElementTree.fromstring(content))


@pytest.mark.parametrize("size", [100, 5_000, 100_000])
def test_blocks_do_not_matter(read_path, small_blocks, size):
    path = FIXTURES / "multi_ex.xml.gz"
    whole = read_path(path)
    small_blocks(size)
    assert read_path(path) == whole
    with SequenceFile(path) as file:
        blocks = list(file.blocks())
    assert len(blocks) == {100: 8, 5_000: 7, 100_000: 2}[size]
    # Blocks are independent of each other.
    tallies = [Tally() for _ in blocks]
    records = [
        list(block.records(tally)) for block, tally in zip(blocks[::-1], tallies, strict=True)
    ]
    assert [record for part in records[::-1] for record in part] == whole[0]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b'length="74"', b'length="75"', "length differs from the one that the entry declares"),
        (b'length="74"', b"", "length differs from the one that the entry declares"),
        (b"<accession>P56540</accession>", b"", "no accession"),
        (b"<sequence length", b"<sequenze length", None),
    ],
)
def test_a_broken_entry_is_rejected_by_name_and_others_are_kept(read, old, new, reason):
    if reason is None:
        start = SEVERAL.index(b"P56540")
        begin = SEVERAL.index(b"<sequence length", start)
        end = SEVERAL.index(b"</sequence>", start) + len(b"</sequence>")
        content, reason = SEVERAL[:begin] + SEVERAL[end:], "no sequence"
    else:
        assert SEVERAL.count(old) == 1
        content = SEVERAL.replace(old, new)
    records, tally = read(content)
    assert len(records) == 7
    assert "P56540" not in {record.identifier for record in records}
    ((told, [(name, _, line)]),) = tally.listed.items()
    assert told == reason
    assert name == ("line:1953" if reason == "no accession" else "P56540")
    assert line == 1953


def test_white_space_that_is_not_ascii_is_rejected(read):
    begin = ONE.index(b"ANACTK")
    for place in (begin, begin + 5, begin + 50):
        _, tally = read(ONE[:place] + "\u00a0".encode() + ONE[place:])
        assert tally.rejected == {"length differs from the one that the entry declares": 1}


@pytest.mark.parametrize("num_lines", [65_400, 65_430, 70_000, 200_000])
def test_lines_are_right_however_many_there_are(read, num_lines):
    """A block of 4 MiB has more lines than libxml2 counts for a node."""
    begin, end = ONE.index(b"<entry"), ONE.index(b"</entry>") + len(b"</entry>")
    entry = ONE[begin:end]
    broken = entry.replace(b'<sequence length="50"', b'<sequence length="51"')
    content = ONE[:end] + b"\n" * num_lines + (entry + b"\n" + broken + b"\n") * 3 + ONE[end:]
    records, tally = read(content)
    lines = [number for number, line in enumerate(content.split(b"\n"), 1) if b"<entry " in line]
    ((_, listed),) = tally.listed.items()
    assert sorted([r.line for r in records] + [line for _, _, line in listed]) == lines


def test_a_file_of_one_endless_entry_is_not_called_empty(read, monkeypatch):
    monkeypatch.setattr("protlm.data.records.uniprot_xml._MAX_ENTRY", 1_000)
    monkeypatch.setattr("protlm.data.records.block.BLOCK_BYTES", 1_000)
    records, tally = read(ONE)
    assert not records
    assert tally.rejected == {"entry of more than 1,000 bytes": 1}


def test_a_truncated_file_is_an_error_with_the_last_accession(read):
    expected = by_biopython(SEVERAL)
    rng = random.Random(0)
    for place in [rng.randrange(1_000, len(SEVERAL) - 12) for _ in range(200)] + [
        len(SEVERAL) - 12
    ]:
        content = SEVERAL[:place]
        begun = [name for name, _ in expected if f"<accession>{name}<".encode() in content]
        with pytest.raises(InputDataError, match=r"line \d+: the XML is damaged or ends") as caught:
            read(content)
        assert any(f"accession {name} " in str(caught.value) for name in begun[-2:]), place


def test_a_file_that_ends_between_entries_is_an_error(read, small_blocks):
    end = SEVERAL.index(b"</entry>") + len(b"</entry>\n")
    for size in (100, 4 << 20):
        small_blocks(size)
        with pytest.raises(InputDataError, match="ends prematurely, near accession P00750 "):
            read(SEVERAL[:end])


BOMB = b"""<?xml version="1.0"?>
<!DOCTYPE uniprot [<!ENTITY a "lol"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>
"""
OUTSIDE = b"""<!-- x --><!DOCTYPE uniprot [<!ENTITY secret SYSTEM "file:///etc/passwd">]>"""


@pytest.mark.parametrize("declaration", [BOMB, OUTSIDE, b'<!DOCTYPE uniprot SYSTEM "x.dtd">'])
def test_document_types_are_rejected(read, declaration):
    root = ONE.index(b"<uniprot")
    with pytest.raises(InputDataError, match="document type"):
        read(declaration + ONE[root:])
    # One after the root is rejected, too.
    hidden = ONE[root:].replace(b"<entry ", declaration + b"<entry ", 1)
    with pytest.raises(InputDataError, match="the XML is damaged"):
        read(hidden)


def test_entities_are_not_resolved(read):
    for entity in (b"&secret;", b"&lol;"):
        with pytest.raises(InputDataError, match="the XML is damaged"):
            read(ONE.replace(b"<name>", b"<name>" + entity, 1))


def test_unusual_content_of_an_entry_is_harmless(read):
    (expected,), _ = read(ONE)
    for odd in (b"P84<!-- > -->001", b"\n P84001\n", b"P84<?x?>001"):
        (record,), _ = read(ONE.replace(b"<accession>P84001", b"<accession>" + odd, 1))
        assert (record.identifier, record.header) == (expected.identifier, expected.header)
    # An identifier is one word: a line end in it would make two records of one in FASTA.
    records, tally = read(ONE.replace(b"<accession>P84001", b"<accession>P84\n&gt;001", 1))
    assert (records, tally.rejected) == ([], {"no accession": 1})
    taxon = f'type="NCBI Taxonomy" id="{expected.taxon}"'.encode()
    assert taxon in ONE
    for number in (b"9" * 5_000, "²".encode(), b""):
        (record,), _ = read(ONE.replace(taxon, b'type="NCBI Taxonomy" id="%b"' % number, 1))
        assert record.taxon is None


def test_an_endless_entry_is_rejected_and_the_next_one_kept(read, small_blocks, monkeypatch):
    small_blocks(1 << 16)
    monkeypatch.setattr("protlm.data.records.uniprot_xml._MAX_ENTRY", 1 << 20)
    root, end = ONE.index(b"<entry "), ONE.index(b"</uniprot>")
    endless = ONE[root:end].replace(b"<name>29C0", b"<name>" + b"x" * (2 << 20), 1)
    content = ONE[:end] + endless + ONE[root:]
    records, tally = read(content)
    assert [record.identifier for record in records] == ["P84001", "P84001"]
    assert tally.records == 3
    ((reason, [(name, _, _)]),) = tally.listed.items()
    assert reason.startswith("entry of more than") and name == "P84001"


def test_processed_entries_are_released():
    root, end = ONE.index(b"<entry "), ONE.index(b"</entry>") + len(b"</entry>")
    document = ONE[:root] + ONE[root:end] * 50 + ONE[end:]
    places = [entry.getparent().index(entry) for entry in _entries(document)]
    assert len(places) == 50
    assert max(places) == 1
