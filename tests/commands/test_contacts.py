"""`protlm contacts`: many files, one HDF5 file and one table, and a fit that is kept."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from protlm.analysis.contact_regression import ContactRegression
from protlm.analysis.structures import read_structure, structure_files
from protlm.commands import contacts as command
from protlm.commands.contacts import contacts
from protlm.model.pretrained import PretrainedModel
from protlm.options.look import ContactOptions
from protlm.system.errors import InputDataError, InterruptedJobError, UserError
from protlm.system.paths import sample_dir
from tests.fixtures.runs import RUN
from tests.small_models import shortest_structures

SEQUENCE = "MKTAYIAKQRQISFVKSHFSRQ"
FIT = sample_dir() / "structures" / "fit"
FASTA = Path("x.fasta")
STRUCTURES = shortest_structures("test", 2)


@pytest.fixture(autouse=True)
def fasta(own_folder: None) -> None:
    """A FASTA file of one protein."""
    FASTA.write_text(f">P1\n{SEQUENCE}\n")


def predict(*sources: Path, output: str = "c.h5", **options: Any) -> None:
    """Predicts contacts of the FASTA file, or of other sources."""
    contacts(sources or (FASTA,), RUN, Path(output), ContactOptions(**options))


@pytest.mark.slow
def test_many_files_and_a_kept_fit(capsys: pytest.CaptureFixture[str]) -> None:
    names = [path.name.split(".")[0] for path in STRUCTURES] + ["P1"]
    FASTA.write_text(f">P1\n{SEQUENCE}\n>P2\nMK1V\n>P3\n\n")
    predict(*STRUCTURES, FASTA, figure=Path("c.png"))
    printed = capsys.readouterr()
    for name in names:
        assert Path(f"c.{name}.png").is_file()
        assert name in printed.out
    assert "3 records: 1 predicted, 2 skipped" in printed.err
    assert "1 blank sequence" in printed.err and "1 digit" in printed.err
    fit = Path("c.fit.json")
    assert f"--fit {fit}" in printed.err
    with h5py.File("c.h5") as file:
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
    predict(output="again.h5", fit=fit)
    with h5py.File("again.h5") as file:
        np.testing.assert_array_equal(file["P1/probabilities"][:], expected)
    assert not Path("again.fit.json").exists()
    (fitted,) = shortest_structures("fit", 1)
    predict(fitted, STRUCTURES[0], output="seen.h5", fit=fit)
    (seen,) = [line for line in capsys.readouterr().out.splitlines() if "in the fit" in line]
    assert fitted.name.split(".")[0] in seen
    stored = json.loads(fit.read_text())
    fit.write_text(json.dumps(stored | {"model_hash": "0" * 64}))
    with pytest.raises(UserError, match="was fitted with another model"):
        predict(output="other.h5", fit=fit)
    for damaged in (
        stored | {"intercept": float("inf")},
        stored | {"weights": [float("nan"), *stored["weights"][1:]]},
        {},
    ):
        fit.write_text(json.dumps(damaged))
        with pytest.raises(InputDataError, match=r"is not a fit.*give a NAME\.fit\.json file"):
            predict(output="other.h5", fit=fit)
    assert not Path("other.h5").exists()


@pytest.mark.slow
def test_long_structures_are_refused_before_and_counted_in_a_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = sorted(len(read_structure(path)) for path in structure_files(FIT))
    limits = iter((lengths[3], lengths[0] - 1))
    limit = 20
    monkeypatch.setattr(PretrainedModel, "max_residues", property(lambda _: limit))
    with pytest.raises(UserError, match=rf"^{STRUCTURES[0]} has .* more than the 20 that"):
        predict(*STRUCTURES, FASTA)
    limit = next(limits)
    predict(output="c.h5", fit=FIT)
    lost = sum(length > limit for length in lengths)
    assert f"{lost} of {len(lengths)} structures to fit to have over" in capsys.readouterr().err
    limit = next(limits)
    with pytest.raises(InputDataError, match=r"has no structure of at most .* give shorter"):
        predict(output="d.h5", fit=FIT)


@pytest.mark.slow
def test_a_failure_leaves_no_figure(look_at: Callable[..., None]) -> None:

    def fail(*_: Any) -> None:
        if len(list(Path().glob("c.*.png"))) == 1:
            raise KeyboardInterrupt

    look_at(command, "unless_full", fail)
    with pytest.raises(InterruptedJobError):
        predict(*STRUCTURES, FASTA, figure=Path("c.png"))
    assert [path.name for path in Path().iterdir()] == ["x.fasta"]


def test_a_folder_is_read_as_its_files(capsys: pytest.CaptureFixture[str]) -> None:
    folder, (one, other) = Path("models"), STRUCTURES
    folder.mkdir()
    names = [path.name.split(".")[0] for path in STRUCTURES]
    for path, name in ((one, one.name), (one, f"{names[0]}.ent.gz"), (other, other.name)):
        (folder / name).write_bytes(path.read_bytes())
    (folder / f"._{one.name}").write_bytes(bytes(9))
    (fitted,) = shortest_structures("fit", 1)
    Path("fit").mkdir()
    (Path("fit") / fitted.name).write_bytes(fitted.read_bytes())
    predict(folder, FASTA, fit=Path("fit"))
    with h5py.File("c.h5") as file:
        assert sorted(file) == sorted([*names, "P1"])
    said = capsys.readouterr().err
    assert "models: hidden files skipped: 1" in said and "again, and is left out" in said
    (folder / f"{names[0]}.pdb").write_bytes(gzip.decompress(other.read_bytes()))
    with pytest.raises(InputDataError, match=f"are two different structures named {names[0]}"):
        predict(folder, output="d.h5", fit=Path("fit"))
    assert not Path("d.h5").exists()


def test_a_full_memory_loses_one_protein(
    look_at: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    structure, other = STRUCTURES
    lengths = len(SEQUENCE), len(read_structure(structure))

    def fail(_: ContactRegression, model: PretrainedModel, sequence: str) -> None:
        if len(sequence) in lengths:
            raise MemoryError

    look_at(ContactRegression, "predict_protein", fail)
    predict(structure, other, FASTA)
    name = structure.name.split(".")[0]
    with h5py.File("c.h5") as file:
        assert list(file) == [other.name.split(".")[0]]
        skipped = [row["identifier"].decode() for row in np.asarray(file.attrs["skipped"])]
    assert skipped == [name, "P1"]
    said = capsys.readouterr().err
    for one, length in zip(skipped, lengths[::-1], strict=True):
        assert f"skipped {one}: {length:,} residues do not fit into the memory" in said
