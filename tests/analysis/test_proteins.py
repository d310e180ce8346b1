"""The proteins of an evaluation that reads no split."""

from pathlib import Path

import pytest

from protlm.analysis.proteins import ProteinChoice
from protlm.loading import load_model


def test_rejected_records_are_told(tiny_run: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.fasta"
    path.write_text(">A\nMKTA\n>B\n\n>C\nMKTC\n")
    chosen = ProteinChoice(
        structures="sample", sequences=str(path), max_proteins=10, max_residues=100
    )
    with pytest.warns(UserWarning, match="x.fasta: 1 of 3 records rejected"):
        proteins = chosen.read(load_model(tiny_run))
    assert [protein.identifier for protein in proteins] == ["A", "C"]
