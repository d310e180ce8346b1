"""`protlm contacts`: many files, one HDF5 file and one table, and a fit that is kept."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from protlm.commands.contacts import ContactOptions, contacts
from protlm.errors import InputDataError, UserError
from protlm.paths import sample_dir

SEQUENCE = "MKTAYIAKQRQISFVKSHFSRQ"


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    """Two structures and a FASTA file of one protein."""
    structures = sorted((sample_dir() / "structures" / "test").glob("*.gz"))
    fasta = tmp_path / "x.fasta"
    fasta.write_text(f">P1\n{SEQUENCE}\n")
    return [*sorted(structures, key=lambda path: path.stat().st_size)[:2], fasta]


def test_many_files_and_a_kept_fit(
    sources: list[Path], tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [path.name.split(".")[0] for path in sources[:2]] + ["P1"]
    contacts(sources, tiny_run, tmp_path / "c.h5", ContactOptions(figure=tmp_path / "c.png"))
    printed = capsys.readouterr()
    for name in names:
        assert (tmp_path / f"c.{name}.png").is_file()
        assert name in printed.out
    assert "1 records: 1 predicted, 0 skipped" in printed.err
    fit = tmp_path / "c.fit.json"
    assert f"--fit {fit}" in printed.err
    with h5py.File(tmp_path / "c.h5") as file:
        assert list(file) == names
        truth_LL = file[f"{names[0]}/contacts"][:]
        assert "contacts" in file[names[0]] and "contacts" not in file["P1"]
        expected = file["P1/probabilities"][:]
    rows, columns = np.nonzero(truth_LL >= 0)
    is_far = columns - rows >= 24
    chance = (truth_LL[rows, columns][is_far] == 1).mean()
    (line,) = (line for line in printed.out.splitlines() if names[0] in line and "%" in line)
    assert line.split()[-1] == f"{chance:.1%}"
    contacts(sources[2:], tiny_run, tmp_path / "again.h5", ContactOptions(fit=fit))
    with h5py.File(tmp_path / "again.h5") as file:
        np.testing.assert_array_equal(file["P1/probabilities"][:], expected)
    assert not (tmp_path / "again.fit.json").exists()
    stored = json.loads(fit.read_text())
    fit.write_text(json.dumps(stored | {"model_hash": "0" * 64}))
    with pytest.raises(UserError, match="was fitted with another model"):
        contacts(sources[2:], tiny_run, tmp_path / "other.h5", ContactOptions(fit=fit))
    fit.write_text(json.dumps(stored | {"intercept": float("inf")}))
    with pytest.raises(InputDataError, match="is not a fit"):
        contacts(sources[2:], tiny_run, tmp_path / "other.h5", ContactOptions(fit=fit))
    fit.write_text(json.dumps(stored | {"weights": [float("nan"), *stored["weights"][1:]]}))
    with pytest.raises(InputDataError, match="is not a fit"):
        contacts(sources[2:], tiny_run, tmp_path / "other.h5", ContactOptions(fit=fit))
    fit.write_text("{}")
    with pytest.raises(InputDataError, match=r"is not a fit.*give a NAME\.fit\.json file"):
        contacts(sources[2:], tiny_run, tmp_path / "other.h5", ContactOptions(fit=fit))
    assert not (tmp_path / "other.h5").exists()


def test_an_identifier_in_two_files_is_refused(
    sources: list[Path], tiny_run: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again.fasta"
    again.write_text(sources[2].read_text())
    with pytest.raises(InputDataError, match=r"again\.fasta: the identifier P1 is also in "):
        contacts([sources[2], again], tiny_run, tmp_path / "c.h5", ContactOptions())
