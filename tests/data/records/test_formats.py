"""Sequence files of every format: real ones against Biopython; broken, mutated and hostile ones."""

import gzip
import hashlib
import io
import pickle
import random
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from Bio import SeqIO, SwissProt
from Bio.SeqFeature import ExactPosition, SeqFeature

from protlm.data.records import Feature, Record, SequenceFile, Tally
from protlm.data.records.uniprot_xml import _entries
from protlm.system.errors import InputDataError
from protlm.system.paths import sample_dir

FIXTURES = Path(__file__).resolve().parent / "fixtures"
FLAT, XML = (sorted(FIXTURES.glob(f"*.{name}.gz")) for name in ("dat", "xml"))
FILES = {
    "fasta": sample_dir() / "uniprot_tiny.fasta.gz",
    "swissprot": FIXTURES / "emboss_trembl_9.dat.gz",
    "xml": FIXTURES / "multi_ex.xml.gz",
}


def unpacked(name: str) -> bytes:
    return gzip.decompress((FIXTURES / name).read_bytes())


SMALL = ["P60137.dat.gz", "P68308.dat.gz", "H2CNN8.dat.gz", "P39896.dat.gz"]
FRAGMENT, NEXT = map(unpacked, SMALL[2:])
SEVERAL, ONE = unpacked("multi_ex.xml.gz"), unpacked("P84001.xml.gz")
BEGIN, END = ONE.index(b"<entry "), ONE.index(b"</entry>") + len(b"</entry>")
ENTRY = ONE[BEGIN:END]


def by_biopython(content: bytes) -> list[SwissProt.Record]:
    return list(SwissProt.parse(io.StringIO(content.decode())))


def xml_by_biopython(content: bytes) -> list:
    return list(SeqIO.parse(io.BytesIO(content), "uniprot-xml"))


def feature_of(feature: SeqFeature) -> Feature:
    """Converts a feature of Biopython, whose positions are half open and certain or of a class."""
    location: Any = feature.location
    first, last = location.start, location.end
    return Feature(
        str(feature.type),
        int(first) if type(first) is ExactPosition else None,
        int(last) - 1 if type(last) is ExactPosition else None,
    )


def found(records):
    return [(record.identifier, record.sequence) for record in records]


def assert_origin(record: Record, entry: SwissProt.Record) -> None:
    assert record.taxon == int(entry.taxonomy_id[0])
    assert record.organism == entry.organism.removesuffix(".")
    told = entry.description
    assert record.is_fragment == ("Flags:" in told and "Fragment" in told)
    kind = "sp" if entry.data_class == "Reviewed" else "tr"
    assert record.header.startswith(f"{kind}|")
    assert record.header.endswith(f"|{record.identifier}|{entry.entry_name}")


@pytest.mark.parametrize("path", [*FLAT, *XML], ids=lambda path: path.name)
def test_real_entries_match_biopython(read_path, path):
    """Of releases before and after 2019, when the format of features changed."""
    content = unpacked(path.name)
    records, tally = read_path(path, features=True)
    if path in FLAT:
        entries = by_biopython(content)
        expected = [(entry.accessions[0], entry.sequence) for entry in entries]
        starts = [f"ID   {entry.entry_name} " for entry in entries]
    else:
        entries = xml_by_biopython(content)
        expected = [(entry.id, str(entry.seq)) for entry in entries]
        starts = ["<entry "] * len(entries)
    assert found(records) == expected
    assert tally.records == len(records)
    lines = content.decode().splitlines()
    for record, entry, start in zip(records, entries, starts, strict=True):
        features = [one._replace(note="") for one in record.features]
        assert features == list(map(feature_of, entry.features))
        # What Biopython has no place for: the ligands of XML.
        for one, other in zip(record.features, entry.features, strict=True):
            words = {other.qualifiers.get(x) for x in ("ligand", "note", "description")}
            assert one.note in words | {""} or one.kind == "binding site"
        assert lines[record.line - 1].lstrip().startswith(start)
        if path in FLAT:
            assert_origin(record, entry)
    assert {record.features for record in read_path(path)[0]} == {None}


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


# --- broken entries

# What stands before and after an entry of a format, the entry, and its name.
AROUND = {
    "dat": (NEXT, NEXT, FRAGMENT, "H2CNN8"),
    "xml": (ONE[:BEGIN] + ENTRY + b"\n", ENTRY + ONE[END:], ENTRY, "P84001"),
}
LENGTH = "length differs from the one that the entry declares"
BEFORE = "residues without a preceding"
# The format of an entry, what is replaced in it, and why it is rejected.
BROKEN: list[tuple[str, bytes, bytes, str]] = [
    ("dat", b"\n//", b"", "no '//' at the end"),
    ("dat", FRAGMENT[FRAGMENT.index(b"     FIVVV") :], b"", "no '//' at the end"),
    ("dat", b"FIVVV", b"FIVV", LENGTH),
    ("dat", b" 196 AA.", b" 197 AA.", LENGTH),
    ("dat", b" 196 AA;", b" 197 AA;", LENGTH),
    ("dat", b"AC   H2CNN8;\n", b"", "no accession"),
    ("dat", b" 196 AA.", b" AA.", "no ID line in UniProt's format"),
    ("dat", b"\nSQ ", b"\nCC ", BEFORE),
    ("dat", b"     FIVVV", b"CC   FIVVV", BEFORE),
    ("dat", b"     YATIM", b"CC   YATIM", BEFORE),
    ("dat", b"//\n", b"//\nCC   more\n", "text after the '//'"),
    ("dat", b"FIVVV", b"FIV1V", "digit"),
    ("dat", b"FIVVV", b"FIV\xffV", "letter that is not ASCII"),
    ("dat", b"CC   ---", b"CC   " + b"-" * (17 << 20), "entry of more than"),
    ("xml", b'<sequence length="50"', b'<sequence length="51"', LENGTH),
    ("xml", b'<sequence length="50"', b"<sequence", LENGTH),
    ("xml", b"ANACTK", b"\xc2\xa0ANACTK", LENGTH),
    ("xml", b"ANACTK", b"ANACT\xc2\xa0K", LENGTH),
    ("xml", b"</sequence>", b"\xc2\xa0</sequence>", LENGTH),
    ("xml", b"<accession>P84001</accession>", b"", "no accession"),
    # An identifier is one word: a line end in it would make two records of one in FASTA.
    ("xml", b"<accession>P84001", b"<accession>P84\n&gt;001", "no accession"),
    ("xml", ENTRY[ENTRY.rindex(b"<sequence ") : ENTRY.index(b"</entry>")], b"", "no sequence"),
    ("xml", b"<name>29C0", b"<name>" + b"x" * (2 << 20), "entry of more than"),
]


@pytest.mark.parametrize(("format_", "old", "new", "reason"), BROKEN, ids=range(len(BROKEN)))
def test_a_broken_entry_is_rejected_by_name_and_others_are_kept(
    read, small_blocks, monkeypatch, format_, old, new, reason
):
    small_blocks(1 << 16)
    monkeypatch.setattr("protlm.data.records.uniprot_xml._MAX_ENTRY", 1 << 20)
    before, after, entry, name = AROUND[format_]
    assert old in entry
    records, tally = read(before + entry.replace(old, new) + after)
    (neighbor,) = {record.identifier for record in records}
    assert neighbor == ("P39896" if format_ == "dat" else "P84001")
    assert (len(records), tally.records) == (2, 3)
    ((told, [(listed, _, line)]),) = tally.listed.items()
    assert told.startswith(reason)
    assert line == before.count(b"\n") + 1
    if reason == "no accession":
        name = "H2CNN8_9ARCH" if format_ == "dat" else f"line:{line}"
    assert listed == name


def mutated(content: bytes, rng: random.Random) -> bytes:
    """The entry with a line or a few bytes changed, lost, doubled or moved."""
    lines = content.splitlines(keepends=True)
    place = rng.randrange(len(lines))
    match rng.randrange(7):
        case 0:
            del lines[place]
        case 1:
            lines.insert(place, lines[rng.randrange(len(lines))])
        case 2:
            other = rng.randrange(len(lines))
            lines[place], lines[other] = lines[other], lines[place]
        case 3:
            line = bytearray(lines[place])
            line[rng.randrange(len(line))] = rng.randrange(32, 127)
            lines[place] = bytes(line)
        case 4:
            line = lines[place]
            cut = rng.randrange(len(line))
            lines[place] = line[:cut] + line[cut + rng.randrange(5) :]
        case 5:
            lines[place] = lines[place].rstrip(b"\n") + rng.choice([b"", b" \n", b"*\n", b"J\n"])
        case 6:
            lines = lines[:place]
    return b"".join(lines)


@pytest.mark.slow
def test_mutated_entries_are_rejected_or_match_biopython(read):
    rng = random.Random(0)
    originals = list(map(unpacked, SMALL))
    outcomes = {"equal": 0, "rejected": 0, "biopython fails": 0}
    for _ in range(1_500):
        content = mutated(rng.choice(originals), rng) + NEXT
        try:
            records, tally = read(content)
        except InputDataError:
            # The first line is not one of a flat file any more.
            continue
        assert len(records) + tally.num_rejected == tally.records
        try:
            entries = by_biopython(content)
        except Exception:
            outcomes["biopython fails"] += 1
            continue
        expected = {
            entry.accessions[0]: entry.sequence.upper().rstrip("*").replace("J", "X")
            for entry in entries
            if entry.accessions
        }
        assert dict(found(records)).items() <= expected.items(), content.decode()
        outcomes["equal" if len(records) == len(entries) else "rejected"] += 1
    assert min(outcomes.values()) > 50, outcomes


# --- unusual entries


def test_uncertain_positions_and_those_of_isoforms_are_none(read):
    content = unpacked(SMALL[0])
    (record,), _ = read(content, features=True)
    assert record.features[0][:4] == ("CHAIN", 0, len(record.sequence) - 1, False)
    lines = ["?..7", "?3..>7", "P1-2:3..7", "P1-2:7", "0..7", "7", "3..", "word"]
    written = "".join(f"FT   SITE            {line}\n" for line in lines).encode()
    (record,), _ = read(content.replace(b"FT   CHAIN", written + b"FT   CHAIN", 1), features=True)
    found = [one for one in record.features if one.kind == "SITE"]
    expected = [(None, 6), (None, None), (None, None), (None, None), (None, 6), (6, 6), (2, None)]
    assert [(one.first, one.last) for one in found] == [*expected, (None, None)]
    assert [one.on_isoform for one in found] == [line.startswith("P1-2") for line in lines]


def test_features_of_another_isoform_or_without_a_place_have_no_positions(read):
    content = re.sub(rb"<location>(\s*<begin)", rb'<location sequence="P1-2">\1', SEVERAL, count=1)
    content = re.sub(rb"<begin .*?/>", b'<begin position="x"/>', content)
    changed, plain = (read(x, features=True)[0][0].features for x in (content, SEVERAL))
    assert changed[0][:4] == (plain[0].kind, None, None, True) != plain[0][:4]
    for found, expected in list(zip(changed, plain, strict=True))[1:]:
        is_one = expected.first == expected.last
        assert found == expected._replace(first=expected.first if is_one else None)


def test_names_of_older_releases_are_understood(read):
    old = FRAGMENT.replace(b"Unreviewed;       196 AA.", b"PRELIMINARY;   PRT;   196 AA.")
    old = old.replace(b"DE   Flags: Fragment;\n", b"").replace(b"A subunit", b"A (Fragment)")
    old = old.replace(b"DE   SubName: Full=", b"DE   Ammonia monooxygenase (Fragment). ")
    (record,), _ = read(old)
    assert record.header.startswith("tr|H2CNN8|")
    assert record.is_fragment
    (record,), _ = read(old.replace(b"(Fragment)", b"(Fragmentin)"))
    assert not record.is_fragment


def test_unusual_xml_is_read(read):
    expected, _ = read(SEVERAL)
    for content in (
        SEVERAL.replace(b'"http://uniprot.org', b'"https://uniprot.org'),
        # With prefixes.
        ElementTree.tostring(ElementTree.fromstring(SEVERAL)),
        SEVERAL.replace(b"\n", b" "),
        b"\xef\xbb\xbf" + SEVERAL,
        SEVERAL.replace(b"<uniprot ", b"<!-- > <uniprot> -->\n<?who cares?>\n<uniprot\n", 1),
    ):
        assert found(read(content)[0]) == found(expected)
    (one,), _ = read(ONE)
    for odd in (b"P84<!-- > -->001", b"\n P84001\n", b"P84<?x?>001"):
        (record,), _ = read(ONE.replace(b"<accession>P84001", b"<accession>" + odd, 1))
        assert (record.identifier, record.header) == (one.identifier, one.header)
    taxon = f'type="NCBI Taxonomy" id="{one.taxon}"'.encode()
    assert taxon in ONE
    for number in (b"9" * 5_000, "²".encode(), b""):
        (record,), _ = read(ONE.replace(taxon, b'type="NCBI Taxonomy" id="%b"' % number, 1))
        assert record.taxon is None


# --- damaged and hostile XML


@pytest.mark.parametrize("num_lines", [65_400, 65_430, 70_000, 200_000])
def test_lines_are_right_however_many_there_are(read, num_lines):
    """A block of 4 MiB has more lines than libxml2 counts for a node."""
    broken = ENTRY.replace(b'<sequence length="50"', b'<sequence length="51"')
    content = ONE[:END] + b"\n" * num_lines + (ENTRY + b"\n" + broken + b"\n") * 3 + ONE[END:]
    records, tally = read(content)
    lines = [number for number, line in enumerate(content.split(b"\n"), 1) if b"<entry " in line]
    ((_, listed),) = tally.listed.items()
    assert sorted([r.line for r in records] + [line for _, _, line in listed]) == lines


def test_a_file_of_one_endless_entry_is_not_called_empty(read, small_blocks, monkeypatch):
    small_blocks(1_000)
    monkeypatch.setattr("protlm.data.records.uniprot_xml._MAX_ENTRY", 1_000)
    records, tally = read(ONE)
    assert not records
    assert tally.rejected == {"entry of more than 1,000 bytes": 1}


def test_a_truncated_file_is_an_error_with_the_last_accession(read, small_blocks):
    names = [entry.id for entry in xml_by_biopython(SEVERAL)]
    rng, last = random.Random(0), len(SEVERAL) - 12
    for place in [*(rng.randrange(1_000, last) for _ in range(200)), last]:
        content = SEVERAL[:place]
        begun = [name for name in names if f"<accession>{name}<".encode() in content]
        with pytest.raises(InputDataError, match=r"line \d+: the XML is damaged or ends") as caught:
            read(content)
        assert any(f"accession {name} " in str(caught.value) for name in begun[-2:]), place
    between = SEVERAL.index(b"</entry>") + len(b"</entry>\n")
    for size in (100, 4 << 20):
        small_blocks(size)
        with pytest.raises(InputDataError, match="ends prematurely, near accession P00750 "):
            read(SEVERAL[:between])


BOMB = b"""<?xml version="1.0"?>
<!DOCTYPE uniprot [<!ENTITY a "lol"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>
"""
OUTSIDE = b"""<!-- x --><!DOCTYPE uniprot [<!ENTITY a SYSTEM "file:///etc/passwd">]>"""


@pytest.mark.parametrize("declaration", [BOMB, OUTSIDE, b'<!DOCTYPE uniprot SYSTEM "x.dtd">'])
def test_document_types_and_entities_are_rejected(read, declaration):
    document = ONE[ONE.index(b"<uniprot") :].replace(b"<name>", b"<name>&a;", 1)
    with pytest.raises(InputDataError, match="document type"):
        read(declaration + document)
    # One after the root is rejected, too, and an entity without one.
    hidden = document.replace(b"<entry ", declaration + b"<entry ", 1)
    for content in (
        hidden,
        *(ONE.replace(b"<name>", b"<name>" + x, 1) for x in (b"&a;", b"&lol;")),
    ):
        with pytest.raises(InputDataError, match="the XML is damaged"):
            read(content)


def test_processed_entries_are_released():
    document = ONE[:BEGIN] + ENTRY * 50 + ONE[END:]
    places = [entry.getparent().index(entry) for entry in _entries(document)]
    assert len(places) == 50
    assert max(places) == 1


# --- blocks of every format


@pytest.mark.parametrize("format_", FILES)
@pytest.mark.parametrize("name", ["proteins.gz", "proteins.fasta", "proteins.xml", "proteins"])
def test_formats_are_recognized_by_first_bytes_not_by_name(tmp_path, read_path, format_, name):
    expected = read_path(FILES[format_])
    packed = FILES[format_].read_bytes()
    for content in (packed, gzip.decompress(packed), b"\n \n" + gzip.decompress(packed)):
        (tmp_path / name).write_bytes(content)
        with SequenceFile(tmp_path / name) as file:
            assert file.format == format_
        records, _ = read_path(tmp_path / name)
        assert [r.sequence for r in records] == [r.sequence for r in expected[0]]


@pytest.mark.parametrize("format_", FILES)
def test_blocks_are_hashed_picklable_and_the_same_for_any_line_end(tmp_path, small_blocks, format_):
    small_blocks(10_000)
    content = gzip.decompress(FILES[format_].read_bytes())
    found = []
    for line_end in (b"\n", b"\n", b"\r\n", b"\r"):
        raw = content.replace(b"\n", line_end)
        (tmp_path / "proteins").write_bytes(raw)
        with SequenceFile(tmp_path / "proteins") as file:
            found.append(list(file.blocks()))
            assert file.source.sha256 == hashlib.sha256(raw).hexdigest()
            assert file.source.num_bytes == len(raw)
    blocks = found[0]
    assert len(blocks) > 2
    assert all(one == blocks for one in [*found, pickle.loads(pickle.dumps(blocks))])
    assert [block.is_first for block in blocks] == [True] + [False] * (len(blocks) - 1)
    assert [block.is_last for block in blocks[::-1]] == [True] + [False] * (len(blocks) - 1)
    lines = content.split(b"\n")
    for block in blocks:
        assert lines[block.line - 1].endswith(block.data.partition(b"\n")[0])
        assert block.file == "proteins"


@pytest.mark.parametrize("format_", FILES)
@pytest.mark.parametrize("size", [100, 5_000, 20_000])
def test_blocks_do_not_matter_and_are_independent(read_path, small_blocks, format_, size):
    whole = read_path(FILES[format_])
    small_blocks(size)
    assert read_path(FILES[format_]) == whole
    with SequenceFile(FILES[format_]) as file:
        blocks = list(file.blocks())
    assert len(blocks) > 1
    parts = [list(block.records(Tally())) for block in reversed(blocks)]
    assert [record for part in reversed(parts) for record in part] == whole[0]
