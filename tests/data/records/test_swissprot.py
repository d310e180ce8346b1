"""Swiss-Prot flat files: the scanner against Bio.SwissProt, on real entries and mutated ones."""

import gzip
import io
import random
from pathlib import Path

import pytest
from Bio import SwissProt

from protlm.system.errors import InputDataError

FIXTURES = Path(__file__).resolve().parent / "fixtures"
FILES = sorted(FIXTURES.glob("*.dat.gz"))
SMALL = ["P60137.dat.gz", "P68308.dat.gz", "H2CNN8.dat.gz", "P39896.dat.gz"]
FRAGMENT, NEXT = (gzip.decompress((FIXTURES / name).read_bytes()) for name in SMALL[2:])


def by_biopython(content: bytes) -> list[SwissProt.Record]:
    return list(SwissProt.parse(io.StringIO(content.decode())))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_real_entries_match_biopython(read_path, path):
    content = gzip.decompress(path.read_bytes())
    lines = content.decode().splitlines()
    records, tally = read_path(path)
    expected = by_biopython(content)
    assert tally.records == len(records) == len(expected)
    for record, entry in zip(records, expected, strict=True):
        assert record.identifier == entry.accessions[0]
        assert record.sequence == entry.sequence
        assert record.taxon == int(entry.taxonomy_id[0])
        assert record.organism == entry.organism.removesuffix(".")
        assert record.is_fragment == (
            "Flags:" in entry.description and "Fragment" in entry.description
        )
        assert record.header.endswith(f"|{record.identifier}|{entry.entry_name}")
        assert record.header.startswith("sp|" if entry.data_class == "Reviewed" else "tr|")
        assert lines[record.line - 1].startswith(f"ID   {entry.entry_name} ")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_features_match_biopython(read_path, feature_of, path):
    """Of releases before and after 2019, when the format changed."""
    records, _ = read_path(path, features=True)
    entries = by_biopython(gzip.decompress(path.read_bytes()))
    for record, entry in zip(records, entries, strict=True):
        assert list(record.features) == list(map(feature_of, entry.features))


def test_features_are_parsed_on_request_only(read_path):
    assert {record.features for record in read_path(FILES[0])[0]} == {None}


def test_uncertain_positions_and_those_of_isoforms_are_none(read):
    (record,), _ = read(gzip.decompress((FIXTURES / SMALL[0]).read_bytes()), features=True)
    assert record.features[0] == ("CHAIN", 0, len(record.sequence) - 1, False)
    content = gzip.decompress((FIXTURES / SMALL[0]).read_bytes())
    lines = ["?..7", "?3..>7", "P1-2:3..7", "P1-2:7", "0..7", "7", "3..", "word"]
    written = "".join(f"FT   SITE            {line}\n" for line in lines).encode()
    (record,), _ = read(content.replace(b"FT   CHAIN", written + b"FT   CHAIN", 1), features=True)
    found = [one for one in record.features if one.kind == "SITE"]
    expected = [(None, 6), (None, None), (None, None), (None, None), (None, 6), (6, 6), (2, None)]
    assert [(one.first, one.last) for one in found] == [*expected, (None, None)]
    assert [one.on_isoform for one in found] == [line.startswith("P1-2") for line in lines]


def test_the_fixtures_hold_fragments_and_unreviewed_entries(read_path):
    records = [record for path in FILES for record in read_path(path)[0]]
    assert len(records) > 150
    assert {record.is_fragment for record in records} == {True, False}
    assert {record.header[:2] for record in records} == {"sp", "tr"}


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


def test_mutated_entries_are_rejected_or_match_biopython(read):
    rng = random.Random(0)
    originals = [gzip.decompress((FIXTURES / name).read_bytes()) for name in SMALL]
    outcomes = {"equal": 0, "rejected": 0, "biopython fails": 0}
    for _ in range(1_500):
        content = mutated(rng.choice(originals), rng)
        try:
            records, tally = read(content + NEXT)
        except InputDataError:
            # The first line is not one of a flat file any more.
            continue
        assert len(records) + tally.num_rejected == tally.records
        try:
            entries = by_biopython(content + NEXT)
        except Exception:
            outcomes["biopython fails"] += 1
            continue
        expected = {
            entry.accessions[0]: entry.sequence.upper().rstrip("*").replace("J", "X")
            for entry in entries
            if entry.accessions
        }
        found = {r.identifier: r.sequence for r in records}
        assert found.items() <= expected.items(), content.decode()
        outcomes["equal" if len(records) == len(entries) else "rejected"] += 1
    assert min(outcomes.values()) > 50, outcomes


SEQUENCE = FRAGMENT.index(b"     FIVVV")


@pytest.mark.parametrize(
    ("content", "reason", "identifier"),
    [
        (FRAGMENT.replace(b"\n//", b""), "no '//' at the end", "H2CNN8"),
        (FRAGMENT[:SEQUENCE], "no '//' at the end", "H2CNN8"),
        (
            FRAGMENT.replace(b"FIVVV", b"FIVV"),
            "length differs from the one that the entry declares",
            "H2CNN8",
        ),
        (FRAGMENT.replace(b" 196 AA.", b" 197 AA."), "length differs", "H2CNN8"),
        (FRAGMENT.replace(b" 196 AA;", b" 197 AA;"), "length differs", "H2CNN8"),
        (FRAGMENT.replace(b"AC   H2CNN8;\n", b""), "no accession", "H2CNN8_9ARCH"),
        (FRAGMENT.replace(b" 196 AA.", b" AA."), "no ID line in UniProt's format", "H2CNN8"),
        (FRAGMENT.replace(b"\nSQ ", b"\nCC "), "residues without a preceding", "H2CNN8"),
        (FRAGMENT.replace(b"     FIVVV", b"CC   FIVVV"), "residues without a preceding", "H2CNN8"),
        (FRAGMENT.replace(b"     YATIM", b"CC   YATIM"), "residues without a preceding", "H2CNN8"),
        (FRAGMENT + b"CC   more\n", "text after the '//'", "H2CNN8"),
        (FRAGMENT.replace(b"FIVVV", b"FIV1V"), "digit", "H2CNN8"),
        (FRAGMENT.replace(b"FIVVV", b"FIV\xffV"), "letter that is not ASCII", "H2CNN8"),
    ],
)
def test_a_broken_entry_is_rejected_by_name_and_others_are_kept(read, content, reason, identifier):
    records, tally = read(NEXT + content + NEXT)
    assert [record.identifier for record in records] == ["P39896", "P39896"]
    assert tally.records == 3
    ((told, [(name, _, line)]),) = tally.listed.items()
    assert told.startswith(reason)
    assert name == identifier
    assert line == NEXT.count(b"\n") + 1


def test_names_of_older_releases_are_understood(read):
    old = FRAGMENT.replace(b"Unreviewed;       196 AA.", b"PRELIMINARY;   PRT;   196 AA.")
    old = old.replace(b"DE   Flags: Fragment;\n", b"").replace(b"A subunit", b"A (Fragment)")
    old = old.replace(b"DE   SubName: Full=", b"DE   Ammonia monooxygenase (Fragment). ")
    (record,), _ = read(old)
    assert record.header.startswith("tr|H2CNN8|")
    assert record.is_fragment
    (record,), _ = read(old.replace(b"(Fragment)", b"(Fragmentin)"))
    assert not record.is_fragment


def test_an_endless_entry_is_rejected_and_the_next_one_kept(read, small_blocks):
    small_blocks(1 << 16)
    endless = FRAGMENT.replace(b"CC   ---", b"CC   ---" + b"-" * (17 << 20), 1)
    records, tally = read(NEXT + endless + NEXT)
    assert [record.identifier for record in records] == ["P39896", "P39896"]
    assert tally.records == 3
    ((reason, [(name, _, line)]),) = tally.listed.items()
    assert reason.startswith("entry of more than")
    assert (name, line) == ("H2CNN8", NEXT.count(b"\n") + 1)
