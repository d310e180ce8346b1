"""Chains of real structure files, as programs write them, and of files broken on purpose."""

import gzip
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from Bio.PDB.MMCIF2Dict import MMCIF2Dict
from Bio.SeqIO import parse

from protlm.analysis.structures import (
    Structure,
    contact_map,
    imputed_cb,
    is_structure,
    read_chain,
    read_folder,
    read_structure,
    structure_files,
)
from protlm.system.errors import InputDataError
from protlm.system.paths import sample_dir
from tests.fixtures.commands import read_table

DATA = Path(__file__).resolve().parent.parent / "data_files"
PDB, CIF = (gzip.decompress((DATA / f"1A8O.{x}.gz").read_bytes()).decode() for x in ("pdb", "cif"))
SEQRES = [line for line in PDB.splitlines() if line.startswith("SEQRES")]
ATOMS = [x for x in PDB.splitlines() if x.startswith(("ATOM", "HETATM")) and "HOH" not in x]
FIRST, WHOLE = 151, contact_map(read_structure(DATA / "1A8O.pdb.gz"))
(CAPSID,) = (str(record.seq) for record in parse(io.StringIO(PDB), "pdb-seqres"))
SITE = {x[11:]: y for x, y in MMCIF2Dict(io.StringIO(CIF)).items() if x.startswith("_atom_site.")}
NEEDED = ["label_atom_id", "label_comp_id", "label_asym_id", "label_seq_id"]
NEEDED += ["Cartn_x", "Cartn_y", "Cartn_z"]
OPTIONAL = [x for x in SITE if x not in NEEDED or x in ("label_asym_id", "label_seq_id")]


BCIF = b"\x83\xa7encoder\xa5mol*/\xa7version\xa50.3.0"
MMTF = b"\xde\x00\x27\xabmmtfVersion\xa50.2.0\xacmmtfProducer"
FREE = ["ATOM 1 N MET 1 27.3 24.4 2.6 -0.3000 1.85"] * 3 + [""]


def number(line: str) -> int:
    return int(line[22:26])


def renumbered(line: str, by: int) -> str:
    return f"{line[:22]}{number(line) + by:4d}{line[26:]}"


def write(path: Path, lines: list[str] | str | bytes) -> Path:
    text = "\n".join(lines) if isinstance(lines, list) else lines
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read(path: Path, lines: list[str] | str | bytes) -> Structure:
    return read_structure(write(path, lines))


def mmcif(columns: list[str], header: str = "", *, keep: Callable[[int], bool] = bool) -> str:
    """The atoms of 1A8O with these columns, of the residues that are kept."""
    rows = zip(SITE["auth_seq_id"], *(SITE[tag] for tag in columns), strict=True)
    lines = [" ".join(f'"{x}"' for x in row) for place, *row in rows if keep(int(place))]
    tags = [f"_atom_site.{tag}" for tag in columns]
    return "\n".join(["data_x", header, "loop_", *tags, *lines, "#", ""]).replace('"?"', "?")


@pytest.mark.parametrize(
    ("parent", "names", "letters"),
    [
        ("HIS", "HSD HSE HSP HID HIE HIP HIS HSE", "HHHHHHHH"),
        ("CYS", "CYX CYM CYS2 CYSH", "CCCC"),
        ("ASP", "ASH ASPP", "DD"),
        ("GLU", "GLH GLUP", "EE"),
        ("LYS", "LYN LSN LYSH", "KKK"),
        ("ARG", "ARN SEC PYL", "RUO"),
        ("ALA", "DAL ALA", "AA"),
        # The ligands of these codes, which do not have the atoms of His and Glu.
        ("GLN", "HSE GLH ZZZ UNK", "SQXX"),
    ],
)
def test_residues_of_force_fields_are_their_parents(
    parent: str, names: str, letters: str, tmp_path: Path
) -> None:
    atoms = ATOMS
    if parent == "HIS":
        # The capsid has none; a phenylalanine, with the elements of a histidine.
        ring = {"CD1": "ND1", "CE2": "NE2", "CZ": "HD1"}
        atoms = [
            f"{x[:12]} {ring.get(x[13:16].strip(), x[13:16]):<3s} HIS{x[20:]}" if "PHE" in x else x
            for x in ATOMS
        ]
    at = {number(line) - FIRST for line in atoms if line[17:20] == parent}
    for name, letter in zip(names.split(), letters, strict=True):
        expected = "".join(letter if i in at else x for i, x in enumerate(CAPSID))
        note = f"chain A: residues of unknown kind are X: {len(at)} {name}"
        for kind in ("ATOM  ", "HETATM"):
            lines = [
                f"{kind}{x[6:17]}{name:<4s}{x[21:]}" if x[17:20] == parent else x for x in atoms
            ]
            found = read(tmp_path / "a.pdb", lines)
            assert found.sequence == expected
            assert found.notes == ((note,) if letter == "X" else ())


@pytest.mark.parametrize("missing", [(151, 160), (160, 164), (211, 220), (175, 175)])
def test_residues_without_coordinates_have_their_letters(
    missing: tuple[int, int], tmp_path: Path
) -> None:
    def keep(place: int) -> bool:
        return not missing[0] <= place <= missing[1] and not 200 <= place <= 201

    entity = "loop_\n_entity_poly_seq" + CIF.partition("loop_\n_entity_poly_seq")[2]
    entity = entity.partition("#")[0] + "#"
    kept = [line for line in ATOMS if keep(number(line))]
    capped = ["SEQRES   0 A   71  ACE", *SEQRES]
    by_author = [x for x in SITE if x != "label_seq_id"]
    resolved = np.array([keep(FIRST + i) for i in range(len(CAPSID))])
    for name, text in {
        "a.pdb": SEQRES + kept,
        # Numbers of another kind, which start again after a gap.
        "b.pdb": capped + [renumbered(x, -100 * (number(x) > 201)) for x in kept],
        "a.cif": mmcif([*SITE], entity, keep=keep),
        "b.cif": mmcif(by_author, entity, keep=keep),
    }.items():
        found = read(tmp_path / name, text)
        assert found.sequence == CAPSID
        np.testing.assert_array_equal(~np.isnan(found.cb_L3[:, 0]), resolved)
        expected = np.where(resolved[:, None] & resolved, WHOLE, -1)
        np.testing.assert_array_equal(contact_map(found), expected)
        assert f"A: {(~resolved).sum()} of 70 residues have no coordinates" in found.notes[0]
    other = read(tmp_path / "c.pdb", [line.replace("LEU", "VAL") for line in SEQRES] + kept)
    assert set(other.sequence) > {"X"} and "does not fit its atoms" in other.notes[0]


@pytest.mark.parametrize(("jump", "filled"), [(150, 150), (999, 999), (1000, 0), (-150, 0)])
def test_gaps_have_the_length_of_the_numbering(jump: int, filled: int, tmp_path: Path) -> None:
    kept = [line for line in ATOMS if not 160 <= number(line) <= 164]
    found = read(tmp_path / "a.pdb", [renumbered(x, (jump - 5) * (number(x) > 164)) for x in kept])
    assert found.sequence == CAPSID[:9] + "X" * filled + CAPSID[14:]
    where = f"numbers go from 159 to {160 + jump} at a break"
    assert found.notes == (f"chain A: {where}; {filled} residues X are put there",)
    # A jump where the chain is bonded is not a gap.
    bonded = [renumbered(line, 2000 * (number(line) > 170)) for line in ATOMS]
    assert read(tmp_path / "bonded.pdb", bonded).sequence == CAPSID


@pytest.mark.parametrize("lost", [*OPTIONAL, "all"])
def test_names_and_coordinates_suffice(lost: str, tmp_path: Path) -> None:
    columns = NEEDED if lost == "all" else [x for x in SITE if x != lost]
    by_author = ["group_PDB", *(x.replace("label", "auth") for x in NEEDED)]
    for chosen in (columns, by_author) if lost == "all" else (columns,):
        found = read(tmp_path / "a.cif", mmcif(chosen))
        assert (found.sequence, found.chain, found.notes) == (CAPSID, "A", ())
        np.testing.assert_array_equal(contact_map(found), WHOLE)


def test_what_is_needed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protlm.analysis.structure_files._MAX_BYTES", 1 << 20)
    bomb = gzip.compress((ATOMS[0] + "\n").encode() * (1 << 15))
    heavy, one = [*NEEDED, "auth_asym_id"], [*NEEDED[:3], "pdbx_PDB_model_num", *NEEDED[4:]]
    joined = "\n".join(ATOMS)
    assert read(tmp_path / "h.cif", mmcif(heavy).replace('"A"\n', '"HEAVY"\n')).chain == "HEAVY"
    with pytest.raises(InputDataError, match=r"no protein chain 'A'; it has: HEAVY \(auth_asym_id"):
        read_structure(tmp_path / "h.cif", "A")
    for name, text, message in (
        ("a.cif", mmcif([x for x in NEEDED if x != "Cartn_y"]), "there is no _atom_site.Cartn_y"),
        ("b.cif", mmcif(NEEDED[1:]), "no _atom_site.label_atom_id or auth_atom_id"),
        ("c.cif", mmcif(NEEDED).rpartition(" ")[0] + "\n", "an atom lacks columns"),
        ("d.cif", mmcif(one).replace(one[3], "label_seq_id"), "; give each residue of a chain its"),
        ("d.pdb", [f"{x[:22]}   1{x[26:]}" for x in ATOMS], "; give each residue of a chain its"),
        *((f"{n}.pdb", joined[:n], "last line ends within an atom") for n in (82, 99, 133, 150)),
        ("e.pdb", joined[:132] + "\n", "its last line ends within an atom"),
        ("a.pdb.gz", bomb, "more than 1 MB of text; give the chain alone"),
        ("a.cif.gz", bomb, "more than 1 MB of text; give the chain alone"),
        ("b.pdb", PDB.encode("utf-16"), "the text is UTF-16; type: iconv"),
    ):
        with pytest.raises(InputDataError, match=message):
            read(tmp_path / name, text)


def test_short_lines_and_other_line_ends(tmp_path: Path) -> None:
    short = [line[:54] for line in ATOMS]
    for text in (
        "\n".join(short),
        "\r\n".join(short),
        "\r".join(ATOMS),
        "\n".join(ATOMS).strip(),
        "\ufeff" + "\n".join(ATOMS),
        "SEQRES\n" + "\n".join(ATOMS),
    ):
        found = read(tmp_path / "a.pdb", text)
        assert found.sequence == CAPSID and not found.notes
        np.testing.assert_array_equal(contact_map(found), WHOLE)


def test_what_a_file_lacks_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twice = [f"{line[:21]} {line[22:]}" for line in ATOMS]
    found = read(tmp_path / "a.pdb", [*twice, "TER", *twice])
    assert "residues left out, whose numbers were there before: 70; give" in found.notes[0]
    for name in "bcdefg":
        found = read(tmp_path / f"{name}.pdb", [x for x in ATOMS if x[12:16] == " CA "])
        assert found.sequence == CAPSID and (contact_map(found) == -1).all()
        assert "so that no contact is known" in found.notes[0]
    read_folder(tmp_path)
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 6 and printed[-1] == "and 2 more such notes on structures"
    assert printed[1] == f"{tmp_path}/b.pdb, {found.notes[0]}"
    read_folder(sample_dir() / "structures" / "fit")
    assert not capsys.readouterr().err


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
    structure = read(tmp_path / "a.pdb", ATOMS)
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


def test_cb_is_imputed_where_the_file_has_none(tmp_path: Path) -> None:
    real = read(tmp_path / "real.pdb", ATOMS)
    without = [line for line in ATOMS if line[12:16].strip() != "CB"]
    imputed = read(tmp_path / "imputed.pdb", without)
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


# A free serine has all the atoms of a residue, but no bond to the chain.
SERINE = [
    f"HETATM 9{k:03d}  {name:<3s} SER A 301    {90 + k:8.3f}{90:8.3f}{90:8.3f}  1.00  0.00"
    for k, name in enumerate(("N", "CA", "C", "CB"))
]
MODELS = ["MODEL        1", *(x for x in ATOMS if number(x) <= 170), "ENDMDL"]
MODELS += ["MODEL        2", *ATOMS, "ENDMDL"]
# Lines, the sequence, and the residues that are kept but unresolved.
CHAINS = {
    "no backbone": ([x for x in ATOMS if number(x) != 155 or x[12:16] == " C  "], CAPSID, [4]),
    "a ligand": ([*ATOMS, *SERINE], CAPSID, []),
    "several models": (MODELS, CAPSID[:20], []),
}


@pytest.mark.parametrize(("lines", "sequence", "unresolved"), CHAINS.values(), ids=CHAINS)
def test_a_chain_is_the_first_with_all_of_its_residues(
    lines: list[str], sequence: str, unresolved: list[int], tmp_path: Path
) -> None:
    found = read(tmp_path / "a.pdb", lines)
    assert found.sequence == sequence
    assert np.flatnonzero(~is_resolved(found)).tolist() == unresolved


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
    index = CAPSID.index("F")
    before, here, after = (
        [x for x in ATOMS if np.sign(number(x) - FIRST - index) == sign] for sign in (-1, 0, 1)
    )
    # All atoms of one alternative come before those of the other, as in the archive.
    first = [f"{x[:16]}APHE{x[20:54]}{occupancy:6.2f}{x[60:]}" for x in here]
    second = [
        f"{x[:16]}BTRP{x[20:30]}{float(x[30:38]) + 50:8.3f}{x[38:54]}{1 - occupancy:6.2f}{x[60:]}"
        for x in here
    ]
    structure = read(tmp_path / "a.pdb", before + first + second + after)
    plain = read(tmp_path / "plain.pdb", ATOMS)
    assert structure.sequence == CAPSID.replace("F", letter, 1)
    expected = plain.cb_L3[index] + np.array([shift, 0.0, 0.0])
    np.testing.assert_allclose(structure.cb_L3[index], expected, atol=1e-3)


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
        write(tmp_path / "empty.pdb", []): r"\(it is empty\); give a complete PDB or mmCIF",
        write(tmp_path / "junk.pdb", bytes(range(128, 256)) * 9): r"\(it has no atoms\); give a",
        write(tmp_path / "b.pdb", BCIF): "this is BinaryCIF; download the entry as mmCIF",
        write(tmp_path / "m.pdb.gz", gzip.compress(MMTF)): "this is MMTF, .* as mmCIF",
        write(tmp_path / "free.pqr", FREE): "this is PQR; give the PDB file from which",
        write(tmp_path / "a.pdb", [f"{x[:22]}    {x[26:]}" for x in ATOMS]): "N of MSE .*number",
        write(tmp_path / "header.cif", cif[:40]): "cannot be read as an mmCIF file",
        write(tmp_path / "sequence.fasta", [">a", "MKV"]): r"\(it has no atoms\); give a complete",
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
    for name in ("b.pdb", "a.cif.gz", "c.ENT", "._b.pdb", ".DS_Store"):
        (tmp_path / name).touch()
    assert [path.name for path in structure_files(tmp_path)] == ["a.cif.gz", "b.pdb", "c.ENT"]


def test_a_structure_is_read_once_from_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Without the stated sequence, a structure is the same.
    write(tmp_path / "1A8O.pdb", [*ATOMS, *SERINE])
    for name in ("1A8O.pdb.gz", "1A8O.cif.gz"):
        (tmp_path / name).write_bytes((DATA / name).read_bytes())
    write(tmp_path / "other.pdb", ATOMS[9:])
    write(tmp_path / "._1A8O.pdb", bytes(64))
    write(tmp_path / ".DS_Store", bytes(64))
    structures, _ = read_folder(tmp_path)
    assert [one.identifier for one in structures] == ["1A8O", "other"]
    hidden, *repeats = capsys.readouterr().err.splitlines()[:3]
    assert hidden == f"{tmp_path}: hidden files skipped: 2, such as .DS_Store"
    assert [Path(x.split()[0]).name for x in repeats] == ["1A8O.pdb", "1A8O.pdb.gz"]
    moved = [f"{x[:30]}{float(x[30:38]) + 1:8.3f}{x[38:]}" for x in ATOMS]
    for lines in (moved, ATOMS[9:], [x.replace("ARG", "LYS") for x in ATOMS]):
        write(tmp_path / "1A8O.ent", lines)
        with pytest.raises(
            InputDataError, match=r"1A8O\.cif\.gz and .*1A8O\.ent are two different"
        ):
            read_folder(tmp_path)


def test_the_shipped_structures_are_what_their_index_says() -> None:
    folder = sample_dir() / "structures"
    assert "CC0" in (folder / "ATTRIBUTION.txt").read_text()
    rows = read_table(folder / "index.tsv")
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
        ends, starts = np.nonzero(contact_map(structure) == 1)
        assert counts == np.histogram(ends - starts, [6, 12, 24, len(structure)])[0].tolist()
    tiers = [row["tier"] for (part, _), row in index.items() if part == "test"]
    assert tiers.count("homolog") == tiers.count("novel") == 10
    assert len({structure.sequence for structure in shipped.values()}) == len(shipped) == 40


def test_the_chain_that_is_used_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write(tmp_path / "one.pdb", ATOMS)
    second = [f"{x[:21]}B{x[22:]}" for x in ATOMS if number(x) > 200]
    two = write(tmp_path / "two.pdb", [*ATOMS, "TER", *second])
    found = read_chain(two, None)
    assert found.chain == "A"
    assert "two.pdb: chain A is used; other chains: B" in capsys.readouterr().err
    for path, chain, others in ((two, "B", ("A",)), (one, None, ())):
        found = read_chain(path, chain)
        assert found.other_chains == others
    assert not capsys.readouterr().err
    assert read_structure(two, "B").sequence == CAPSID[50:]
    with pytest.raises(InputDataError, match=r"two\.pdb has no protein chain 'C'; it has: A, B"):
        read_chain(two, "C")
    read_chain(write(two, [x for x in ATOMS if x[12:16] == " CA "]), "A")
    assert "two.pdb, chain A: it has neither CB nor N, CA and C" in capsys.readouterr().err
