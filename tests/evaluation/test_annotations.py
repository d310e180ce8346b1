"""The features of UniProt: at their positions, in both formats, of unrelated proteins."""

import gzip
from collections import Counter
from pathlib import Path

import pytest

from protlm.analysis.uniprot_features import BOND, read_annotated
from protlm.system.errors import InputDataError
from tests.data.test_relatives import random_sequences

FIXTURES = Path(__file__).resolve().parents[1] / "data" / "records" / "fixtures"
ENTRY_SEQUENCE = "MKTAYCAKQRCISFVKSHFS"


def entry(*features: str, accession: str = "P00001", sequence: str = ENTRY_SEQUENCE) -> str:
    """A Swiss-Prot entry with these lines of features."""
    lines = [
        f"ID   TEST_HUMAN              Reviewed;         {len(sequence)} AA.",
        f"AC   {accession};",
        *(f"FT   {feature}" for feature in features),
        f"SQ   SEQUENCE   {len(sequence)} AA;  1 MW;  0 CRC64;",
        f"     {sequence}",
        "//",
    ]
    return "\n".join(lines) + "\n"


def test_sites_and_bonds_are_at_their_positions(tmp_path: Path) -> None:
    """Of two entries: one with features in the present format, one without."""
    path = tmp_path / "x.dat"
    path.write_text(
        entry(
            "BINDING         3..5",
            "BINDING         9",
            'FT                   /note="a note"',
            "SIGNAL          1..?",
            "TRANSMEM        ?2..7",
            "MOD_RES         <1",
            "ACT_SITE        21",
            "DISULFID        6..11",
            "DISULFID        11",
            "BINDING         P00001-2:3",
            "HELIX           1..20",
        )
        + entry("CHAIN           1..20", accession="P00002")
    )
    found = read_annotated(path, max_proteins=10, max_residues=100, seed=0)
    (protein,) = found.proteins
    assert protein.features == {"binding_site": [(2, 4), (8, 8)], BOND: [(5, 10)]}
    assert found.left_out == {
        "on another isoform": 1,
        "unknown or uncertain position": 3,
        "position outside the sequence": 1,
        "disulfide bond to another chain": 1,
    }


def test_xml_and_flat_file_have_the_same_sites() -> None:
    flat, xml = (
        read_annotated(FIXTURES / f"multi_ex.{kind}.gz", max_proteins=10, max_residues=1000, seed=0)
        for kind in ("dat", "xml")
    )
    assert len(flat.proteins) > 3 and flat == xml
    assert flat.left_out["unknown or uncertain position"] > 0
    assert {name for protein in flat.proteins for name in protein.features} >= {
        BOND,
        "binding_site",
        "active_site",
    }


def orthologs(*families: str, number: int = 4) -> list[str]:
    """Entries in blocks of equal sequences, as Swiss-Prot sorts orthologs."""
    return [
        entry("BINDING         3", accession=f"P{family:02}{place:03}", sequence=sequence)
        for family, sequence in enumerate(families)
        for place in range(number)
    ]


def test_of_each_block_of_orthologs_one_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "x.dat"
    path.write_text("".join(orthologs(*random_sequences(12))))
    found = read_annotated(path, max_proteins=8, max_residues=100, seed=0)
    assert len({protein.sequence for protein in found.proteins}) == len(found.proteins) == 8
    assert found.num_in_file == 48 and found.num_drawn > 8
    every = read_annotated(path, max_proteins=48, max_residues=100, seed=0)
    assert len(every.proteins) == 12 and every.num_drawn == 48
    assert every.proteins[:8] == found.proteins
    (first,), *_, num_drawn, _, _ = read_annotated(path, max_proteins=1, max_residues=100, seed=0)
    assert first == found.proteins[0] and num_drawn == 1


def test_the_draw_depends_on_the_seed_and_not_on_the_order_of_the_file(tmp_path: Path) -> None:
    entries = orthologs(*random_sequences(12), number=1)
    forward, backward = tmp_path / "forward.dat", tmp_path / "backward.dat"
    forward.write_text("".join(entries))
    backward.write_text("".join(entries[::-1]))
    first = []
    for seed in range(100):
        drawn, again = (
            read_annotated(path, max_proteins=3, max_residues=100, seed=seed).proteins
            for path in (forward, backward)
        )
        assert drawn == again
        first.append(drawn[0].accession)
    counts = Counter(first)
    # A uniform draw of 100 has each of the 12 between 1 and 24 times but for 1 in 400.
    assert len(counts) == 12 and max(counts.values()) <= 24


def test_files_without_features_are_refused(tmp_path: Path) -> None:
    fasta, none = tmp_path / "x.fasta", tmp_path / "none.dat.gz"
    fasta.write_text(f">x\n{ENTRY_SEQUENCE}\n")
    none.write_bytes(gzip.compress(entry("CHAIN           1..20").encode()))
    for path, message in ((fasta, "FASTA file, which has no features"), (none, "no protein of")):
        with pytest.raises(InputDataError, match=message):
            read_annotated(path, max_proteins=10, max_residues=100, seed=0)
