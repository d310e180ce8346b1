"""The chain of a structure file."""

from pathlib import Path

import pytest

from protlm.commands.chains import read_chain
from protlm.system.errors import InputDataError

LINE = (
    "ATOM  {n:5d}  {atom:<3s} ALA {chain}{residue:4d}    {x:8.3f}{y:8.3f}{z:8.3f}"
    "  1.00  0.00           {element}\n"
)


def write(path: Path, chains: str) -> Path:
    """A PDB file with three alanines in each chain."""
    atoms = {
        "N": (0.0, 0.0),
        "CA": (1.46, 0.0),
        "C": (2.0, 1.4),
        "O": (1.3, 2.4),
        "CB": (2.0, -0.8),
    }
    lines, number = [], 0
    for chain in chains:
        for residue in range(1, 4):
            for atom, (x, y) in atoms.items():
                number += 1
                at = {"x": x + 3.0 * residue, "y": y, "z": 10.0 * chains.index(chain)}
                lines.append(
                    LINE.format(
                        n=number, atom=atom, chain=chain, residue=residue, element=atom[0], **at
                    )
                )
    path.write_text("".join(lines) + "END\n")
    return path


def test_the_chain_that_is_used_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = write(tmp_path / "two.pdb", "AB")
    assert read_chain(two, None).chain == "A"
    assert "two.pdb: chain A is used; --chain takes another: B" in capsys.readouterr().err
    assert read_chain(two, "B").other_chains == ("A",)
    assert read_chain(write(tmp_path / "one.pdb", "A"), None).other_chains == ()
    assert not capsys.readouterr().err
    with pytest.raises(InputDataError, match="no protein chain 'C'; it has: A, B"):
        read_chain(two, "C")
    lines = [x for x in two.read_text().splitlines() if x[12:16] == " CA "]
    two.write_text("\n".join(lines))
    read_chain(two, "A")
    assert "two.pdb, chain A: it has neither CB nor N, CA and C" in capsys.readouterr().err
