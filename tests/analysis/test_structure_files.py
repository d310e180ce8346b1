"""Structure files as programs write them: few columns, names of force fields, missing residues."""

import gzip
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from Bio.PDB.MMCIF2Dict import MMCIF2Dict
from Bio.SeqIO import parse

from protlm.analysis import structure_files
from protlm.analysis.structures import Structure, contact_map, read_folder, read_structure
from protlm.system.errors import InputDataError
from protlm.system.paths import sample_dir

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


def number(line: str) -> int:
    return int(line[22:26])


def renumbered(line: str, by: int) -> str:
    return f"{line[:22]}{number(line) + by:4d}{line[26:]}"


def read(path: Path, lines: list[str] | str | bytes) -> Structure:
    text = "\n".join(lines) if isinstance(lines, list) else lines
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_structure(path)


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


@pytest.mark.parametrize("lost", [*OPTIONAL, "all"])
def test_names_and_coordinates_suffice(lost: str, tmp_path: Path) -> None:
    columns = NEEDED if lost == "all" else [x for x in SITE if x != lost]
    by_author = ["group_PDB", *(x.replace("label", "auth") for x in NEEDED)]
    for chosen in (columns, by_author) if lost == "all" else (columns,):
        found = read(tmp_path / "a.cif", mmcif(chosen))
        assert (found.sequence, found.chain, found.notes) == (CAPSID, "A", ())
        np.testing.assert_array_equal(contact_map(found), WHOLE)


def test_what_is_needed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure_files, "_MAX_BYTES", 1 << 20)
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
    assert "atoms or residues are there twice" in found.notes[0]
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
