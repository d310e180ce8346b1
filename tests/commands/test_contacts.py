"""`protlm contacts`: many files, one HDF5 file and one table, and a fit that is kept."""

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from protlm.analysis.contact_regression import ContactRegression
from protlm.analysis.structures import read_structure, structure_files
from protlm.commands import contacts as command
from protlm.commands.contacts import ContactOptions, contacts
from protlm.model.pretrained import PretrainedModel
from protlm.system.errors import InputDataError, InterruptedJobError, UserError
from protlm.system.paths import sample_dir

SEQUENCE = "MKTAYIAKQRQISFVKSHFSRQ"
FIT = sample_dir() / "structures" / "fit"


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
        pairs = sum(file[f"{name}/probabilities"].size for name in names)
    assert f"residue pairs predicted {pairs:,}/{pairs:,}" in printed.err
    rows, columns = np.nonzero(truth_LL >= 0)
    is_far = columns - rows >= 24
    chance = (truth_LL[rows, columns][is_far] == 1).mean()
    (line,) = (line for line in printed.out.splitlines() if names[0] in line and "%" in line)
    assert line.split()[-1] == f"{chance:.1%}"
    contacts(sources[2:], tiny_run, tmp_path / "again.h5", ContactOptions(fit=fit))
    with h5py.File(tmp_path / "again.h5") as file:
        np.testing.assert_array_equal(file["P1/probabilities"][:], expected)
    assert not (tmp_path / "again.fit.json").exists()
    fitted = min(structure_files(FIT), key=lambda path: path.stat().st_size)
    contacts([fitted, sources[0]], tiny_run, tmp_path / "seen.h5", ContactOptions(fit=fit))
    lines = capsys.readouterr().out.splitlines()
    (seen,) = [line for line in lines if "in the fit" in line]
    assert fitted.name.split(".")[0] in seen
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


def test_long_structures_are_refused_before_and_counted_in_a_fit(
    sources: list[Path],
    tiny_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = sorted(len(read_structure(path)) for path in structure_files(FIT))
    limits = iter((lengths[3], lengths[0] - 1))
    limit = 20
    monkeypatch.setattr(PretrainedModel, "max_residues", property(lambda _: limit))
    with pytest.raises(UserError, match=rf"^{sources[0]} has .* more than the 20 that"):
        contacts(sources, tiny_run, tmp_path / "c.h5", ContactOptions())
    limit = next(limits)
    contacts(sources[2:], tiny_run, tmp_path / "c.h5", ContactOptions(fit=FIT))
    lost = sum(length > limit for length in lengths)
    assert f"{lost} of {len(lengths)} structures to fit to have over" in capsys.readouterr().err
    limit = next(limits)
    with pytest.raises(InputDataError, match=rf"{len(lengths)} of {len(lengths)} .* give shorter"):
        contacts(sources[2:], tiny_run, tmp_path / "d.h5", ContactOptions(fit=FIT))


def test_a_failure_leaves_no_figure(
    sources: list[Path], tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, done = command.unless_full, []

    def fails(*given: Any) -> Any:
        done.append(given)
        if len(list(tmp_path.glob("c.*.png"))) == 1:
            raise KeyboardInterrupt
        return work(*given)

    monkeypatch.setattr(command, "unless_full", fails)
    with pytest.raises(InterruptedJobError):
        contacts(sources, tiny_run, tmp_path / "c.h5", ContactOptions(figure=tmp_path / "c.png"))
    assert [path.name for path in tmp_path.iterdir()] == ["x.fasta"]


def test_options_that_do_not_suit_are_refused_first(
    sources: list[Path], tiny_run: Path, tmp_path: Path
) -> None:
    for options, words in (
        (ContactOptions(figure=tmp_path / "c.jpg"), r"c\.jpg is not a figure by its name"),
        (ContactOptions(chain="Z"), "--chain Z is for a PDB or mmCIF file, and .*x.fasta is none"),
    ):
        with pytest.raises(UserError, match=words):
            contacts(sources[2:], tiny_run, tmp_path / "c.h5", options)
    assert [path.name for path in tmp_path.iterdir()] == ["x.fasta"]


def test_an_identifier_in_two_files_is_refused(
    sources: list[Path], tiny_run: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again.fasta"
    again.write_text(sources[2].read_text())
    with pytest.raises(InputDataError, match=r"again\.fasta: the identifier P1 is also in "):
        contacts([sources[2], again], tiny_run, tmp_path / "c.h5", ContactOptions())


def test_a_full_memory_loses_one_protein(
    sources: list[Path],
    tiny_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    predict, (structure, *_) = ContactRegression.predict_protein, sources
    lengths = len(SEQUENCE), len(read_structure(structure))

    def or_fail(self: ContactRegression, model: PretrainedModel, sequence: str) -> Any:
        if len(sequence) in lengths:
            raise MemoryError
        return predict(self, model, sequence)

    monkeypatch.setattr(ContactRegression, "predict_protein", or_fail)
    contacts(sources, tiny_run, tmp_path / "c.h5", ContactOptions())
    name = structure.name.split(".")[0]
    with h5py.File(tmp_path / "c.h5") as file:
        assert list(file) == [sources[1].name.split(".")[0]]
        skipped = [row["identifier"].decode() for row in np.asarray(file.attrs["skipped"])]
    assert skipped == [name, "P1"]
    said = capsys.readouterr().err
    for one, length in zip(skipped, lengths[::-1], strict=True):
        assert f"skipped {one}: {length:,} residues do not fit into the memory" in said
