"""Chains read from real PDB and mmCIF files, and from files broken on purpose."""

import csv
from pathlib import Path

import numpy as np
import pytest

from protlm.analysis.structures import (
    Structure,
    contact_map,
    imputed_cb,
    is_structure,
    read_chain,
    read_structure,
    structure_files,
)
from protlm.system.errors import InputDataError
from protlm.system.paths import sample_dir
from tests.analysis.test_structure_files import ATOMS, CAPSID, CIF, DATA, PDB, number, renumbered


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def is_resolved(structure: Structure) -> np.ndarray:
    return ~np.isnan(structure.cb_L3[:, 0])


@pytest.mark.parametrize("suffix", ["pdb", "cif"])
def test_every_format_tells_the_same(suffix: str, tmp_path: Path) -> None:
    plain = write(tmp_path / f"1A8O.{suffix}", (PDB if suffix == "pdb" else CIF).splitlines())
    # Compression is recognized by the contents: people rename files.
    misnamed = tmp_path / f"renamed.{suffix}"
    misnamed.write_bytes((DATA / f"1A8O.{suffix}.gz").read_bytes())
    expected = read_structure(DATA / "1A8O.pdb.gz")
    assert expected.sequence == CAPSID
    others = [tmp_path / name for name in ("a.mmcif", "b.pdb", "c.cif.gz", "d.ent", "e.txt", "f")]
    for path in others:
        path.write_bytes((misnamed if path.suffix else plain).read_bytes())
    for path in (plain, misnamed, DATA / f"1A8O.{suffix}.gz", *others):
        structure = read_structure(path)
        assert is_structure(path) and structure.identifier in (path.name.split(".")[0], "e.txt")
        assert structure.sequence == CAPSID
        np.testing.assert_array_equal(contact_map(structure), contact_map(expected))


def test_a_contact_is_two_cb_within_eight_angstrom(tmp_path: Path) -> None:
    structure = read_structure(write(tmp_path / "a.pdb", ATOMS))
    cb = {
        number(line) - 151: np.array([float(line[30 + 8 * k : 38 + 8 * k]) for k in range(3)])
        for line in ATOMS
        if line[12:16].strip() == "CB"
    }
    found = contact_map(structure)
    for i, here in cb.items():
        for j, there in cb.items():
            assert found[i, j] == (np.linalg.norm(here - there) < 8.0)
    assert found.dtype == np.int8
    assert contact_map(structure, threshold=1e3).min() == 1


def test_cb_is_imputed_where_the_file_has_none(tmp_path: Path) -> None:
    real = read_structure(write(tmp_path / "real.pdb", ATOMS))
    without = [line for line in ATOMS if line[12:16].strip() != "CB"]
    imputed = read_structure(write(tmp_path / "imputed.pdb", without))
    assert is_resolved(real).all() and is_resolved(imputed).all()
    not_glycine = np.array([letter != "G" for letter in real.sequence])
    distance = np.linalg.norm(real.cb_L3 - imputed.cb_L3, axis=1)
    assert distance[not_glycine].mean() < 0.1
    assert (distance[~not_glycine] == 0).all()


def test_imputed_cb_has_the_stated_geometry() -> None:
    n, ca, c = np.random.default_rng(0).normal(size=(3, 3))
    cb = imputed_cb(n, ca, c)
    to_n, to_cb = n - ca, cb - ca
    angle = np.arccos(to_n @ to_cb / np.linalg.norm(to_n) / np.linalg.norm(to_cb))
    first, second = np.cross(n - c, ca - n), np.cross(ca - n, cb - ca)
    cosine = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
    assert np.linalg.norm(to_cb) == pytest.approx(1.522)
    assert angle == pytest.approx(1.927)
    assert cosine == pytest.approx(np.cos(-2.143))
    # A left hand: the side chain of an L amino acid, not of its mirror image.
    assert np.sign(np.cross(first, second) @ (ca - n)) == np.sign(np.sin(-2.143))


def test_missing_residues_are_unknown_and_unresolved(tmp_path: Path) -> None:
    whole = contact_map(read_structure(write(tmp_path / "whole.pdb", ATOMS)))
    kept = [line for line in ATOMS if not 160 <= number(line) <= 164]
    structure = read_structure(write(tmp_path / "gap.pdb", kept))
    assert structure.sequence == CAPSID[:9] + "XXXXX" + CAPSID[14:]
    resolved = is_resolved(structure)
    assert np.flatnonzero(~resolved).tolist() == [9, 10, 11, 12, 13]
    found = contact_map(structure)
    assert (found[~resolved] == -1).all() and (found[:, ~resolved] == -1).all()
    np.testing.assert_array_equal(found[resolved][:, resolved], whole[resolved][:, resolved])


def test_numbers_that_jump_fill_only_broken_chains(tmp_path: Path) -> None:
    jump = [renumbered(line, 2000 * (number(line) > 170)) for line in ATOMS]
    assert read_structure(write(tmp_path / "bonded.pdb", jump)).sequence == CAPSID
    broken = [line for line in jump if not 165 <= number(line) <= 170]
    sequence = read_structure(write(tmp_path / "broken.pdb", broken)).sequence
    assert sequence == CAPSID[:14] + CAPSID[20:]


def test_a_residue_without_backbone_is_kept_but_unresolved(tmp_path: Path) -> None:
    kept = [line for line in ATOMS if number(line) != 155 or line[12:16].strip() == "C"]
    structure = read_structure(write(tmp_path / "a.pdb", kept))
    assert structure.sequence == CAPSID
    assert np.flatnonzero(~is_resolved(structure)).tolist() == [4]


def test_ligands_and_waters_are_no_residues(tmp_path: Path) -> None:
    # A free serine has all the atoms of a residue, but no bond to the chain.
    ligand = [
        f"HETATM 9{k:03d}  {name:<3s} SER A 301    {90 + k:8.3f}{90:8.3f}{90:8.3f}  1.00  0.00"
        for k, name in enumerate(("N", "CA", "C", "CB"))
    ]
    assert read_structure(write(tmp_path / "a.pdb", [*ATOMS, *ligand])).sequence == CAPSID
    assert any(line[17:20] == "HOH" for line in PDB.splitlines())
    assert len(read_structure(DATA / "1A8O.pdb.gz")) == len(CAPSID)


def test_a_residue_with_alternatives_is_one_residue() -> None:
    # Crambin at 0.54 Å: proline or serine at 22, leucine or isoleucine at 25, the former listed.
    crambin = "TTCCPSIVARSNFNVCRLPGTPEALCATYTGCIIIPGATCPGDYAN"
    structure = read_structure(DATA / "1ejg.ent.gz")
    assert structure.sequence == crambin
    assert is_resolved(structure).all()


@pytest.mark.parametrize(("occupancy", "letter", "shift"), [(0.7, "F", 0.0), (0.3, "W", 50.0)])
def test_the_most_occupied_alternative_stands(
    tmp_path: Path, occupancy: float, letter: str, shift: float
) -> None:
    place = CAPSID.index("F") + 151
    lines: list[str] = []
    for line in ATOMS:
        if number(line) != place:
            lines.append(line)
            continue
        x = float(line[30:38]) + 50.0
        head, tail = line[:16], line[20:54]
        lines.append(f"{head}APHE{tail}{occupancy:6.2f}{line[60:]}")
        lines.append(f"{head}BTRP{tail[:10]}{x:8.3f}{tail[18:]}{1 - occupancy:6.2f}{line[60:]}")
    # All atoms of one alternative come before those of the other, as in the archive.
    here = [line for line in lines if number(line) == place]
    before = [line for line in lines if number(line) < place]
    after = [line for line in lines if number(line) > place]
    here.sort(key=lambda line: line[16])
    structure = read_structure(write(tmp_path / "a.pdb", before + here + after))
    plain = read_structure(write(tmp_path / "plain.pdb", ATOMS))
    assert structure.sequence == CAPSID.replace("F", letter, 1)
    index = CAPSID.index("F")
    expected = plain.cb_L3[index] + np.array([shift, 0.0, 0.0])
    np.testing.assert_allclose(structure.cb_L3[index], expected, atol=1e-3)


def test_the_chain_can_be_chosen(tmp_path: Path) -> None:
    second = [f"{line[:21]}B{line[22:]}" for line in ATOMS if number(line) > 200]
    path = write(tmp_path / "two.pdb", [*ATOMS, "TER", *second, "END"])
    assert read_structure(path).sequence == CAPSID
    assert read_structure(path, "B").sequence == CAPSID[50:]
    with pytest.raises(InputDataError, match=r"two\.pdb has no protein chain 'C'; it has: A, B"):
        read_structure(path, "C")


def test_only_the_first_model_is_read(tmp_path: Path) -> None:
    first = [line for line in ATOMS if number(line) <= 170]
    models = ["MODEL        1", *first, "ENDMDL", "MODEL        2", *ATOMS, "ENDMDL"]
    assert read_structure(write(tmp_path / "nmr.pdb", models)).sequence == CAPSID[:20]


def test_what_is_no_structure_is_refused_by_name(tmp_path: Path) -> None:
    truncated = tmp_path / "truncated.pdb.gz"
    truncated.write_bytes((DATA / "1A8O.pdb.gz").read_bytes()[:9000])
    damaged = bytearray((DATA / "1A8O.pdb.gz").read_bytes())
    damaged[5000] ^= 255
    (tmp_path / "damaged.pdb.gz").write_bytes(damaged)
    letters = [f"{line[:30]}  what.is{line[39:]}" for line in ATOMS]
    water = [line for line in PDB.splitlines() if line[17:20] == "HOH"]
    cif = CIF.splitlines()
    broken = {
        truncated: "truncated or damaged",
        tmp_path / "damaged.pdb.gz": "truncated or damaged",
        write(tmp_path / "letters.pdb", letters): "cannot be read as a PDB file",
        write(tmp_path / "water.pdb", water): "no protein chain",
        write(tmp_path / "empty.pdb", []): "a PDB|no atoms|no protein chain",
        write(tmp_path / "header.cif", cif[:40]): "cannot be read as an mmCIF file",
        write(tmp_path / "sequence.fasta", [">a", "MKV"]): "has no atoms; give a complete",
        tmp_path / "nowhere.pdb": "no such file",
    }
    for path, message in broken.items():
        with pytest.raises(InputDataError, match=message) as caught:
            read_structure(path)
        assert path.name in str(caught.value)


def test_a_folder_gives_its_structures_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputDataError, match="no such folder"):
        structure_files(tmp_path / "nowhere")
    (tmp_path / "README.txt").write_text("not a structure")
    with pytest.raises(InputDataError, match="has no structures"):
        structure_files(tmp_path)
    for name in ("b.pdb", "a.cif.gz", "c.ENT"):
        (tmp_path / name).touch()
    assert [path.name for path in structure_files(tmp_path)] == ["a.cif.gz", "b.pdb", "c.ENT"]


def test_the_shipped_structures_are_what_their_index_says() -> None:
    folder = sample_dir() / "structures"
    assert "CC0" in (folder / "ATTRIBUTION.txt").read_text()
    with (folder / "index.tsv").open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    index = {(row["folder"], row["identifier"]): row for row in rows}
    shipped = {
        (part, structure.identifier): structure
        for part in ("fit", "test")
        for structure in map(read_structure, structure_files(folder / part))
    }
    assert shipped.keys() == index.keys()
    for key, structure in shipped.items():
        row = index[key]
        assert int(row["length"]) == len(structure) == is_resolved(structure).sum()
        counts = [int(row[f"contacts_{name}"]) for name in ("short", "medium", "long")]
        assert counts == contacts_by_separation(structure)
    tiers = [row["tier"] for (part, _), row in index.items() if part == "test"]
    assert tiers.count("homolog") == tiers.count("novel") == 10
    assert len({structure.sequence for structure in shipped.values()}) == len(shipped) == 40


def contacts_by_separation(structure: Structure) -> list[int]:
    rows, columns = np.nonzero(contact_map(structure) == 1)
    return np.histogram(columns - rows, bins=[6, 12, 24, len(structure)])[0].tolist()


def test_the_chain_that_is_used_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write(tmp_path / "one.pdb", ATOMS)
    two = write(tmp_path / "two.pdb", [*ATOMS, "TER", *(f"{x[:21]}B{x[22:]}" for x in ATOMS)])
    found = read_chain(two, None)
    assert found is not None and found.chain == "A"
    assert "two.pdb: chain A is used; --chain takes another: B" in capsys.readouterr().err
    for path, chain, others in ((two, "B", ("A",)), (one, None, ())):
        found = read_chain(path, chain)
        assert found is not None and found.other_chains == others
    assert not capsys.readouterr().err
    with pytest.raises(InputDataError, match="no protein chain 'C'; it has: A, B"):
        read_chain(two, "C")
    read_chain(write(two, [x for x in ATOMS if x[12:16] == " CA "]), "A")
    assert "two.pdb, chain A: it has neither CB nor N, CA and C" in capsys.readouterr().err
