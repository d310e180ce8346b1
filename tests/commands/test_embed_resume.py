"""An interrupted `protlm embed` continues by the same command, to the same bytes."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from protlm.commands.embed import embed
from protlm.commands.embedding import estimate, plan
from protlm.commands.embedding.formats import hdf5
from protlm.commands.embedding.options import Dtype, EmbedOptions
from protlm.commands.embedding.parts import Parts
from protlm.commands.embedding.plan import Plan, first_equal
from protlm.model.embedding import Embedder
from protlm.model.pooling import Pooling
from protlm.system.errors import (
    ExitCode,
    InputDataError,
    InterruptedJobError,
    OutputError,
    UserError,
)
from protlm.system.work_folder import BEGUN
from tests.fixtures.runs import Killed

OPTIONS = EmbedOptions(include=(Pooling.mean, Pooling.per_tok), tokens_per_batch=250)


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of seven sequences, so that few proteins make several."""
    monkeypatch.setattr(plan, "_SEQUENCES", 7)


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    """Forty random proteins, some of them equal."""
    rng = np.random.default_rng(0)
    sequences = [
        "".join(rng.choice(list("ACDEFGHIKLMNPQRSTVWY"), n)) for n in rng.integers(5, 90, 30)
    ]
    sequences += sequences[:10]
    path = tmp_path / "x.fasta"
    path.write_text("".join(f">P{i}\n{sequence}\n" for i, sequence in enumerate(sequences)))
    return path


@pytest.fixture
def undisturbed(fasta: Path, tiny_run: Path, tmp_path: Path) -> bytes:
    """The output of a run that was not interrupted."""
    (tmp_path / "whole").mkdir()
    embed(fasta, tiny_run, tmp_path / "whole" / "out.h5", OPTIONS)
    assert [path.name for path in (tmp_path / "whole").iterdir()] == ["out.h5"]
    return (tmp_path / "whole" / "out.h5").read_bytes()


def killed_in_batch(number: int, *, torn: bool) -> Callable[..., None]:
    """Returns a `Parts.write` that dies in a batch, perhaps after half of its bytes."""
    write, count = Parts.write, iter(range(1_000))

    def write_or_die(self: Parts, unit: int, batch: plan.Batch, *content: list) -> None:
        if next(count) < number:
            return write(self, unit, batch, *content)
        if torn:
            write(self, unit, batch, *content)
            path = self.folder / f"{unit:06d}.part"
            path.write_bytes(path.read_bytes()[: batch.offset + batch.num_bytes // 2])
        raise Killed

    return write_or_die


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_killed_command_continues_to_the_same_bytes(
    number: int,
    torn: bool,
    fasta: Path,
    undisturbed: bytes,
    tiny_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out.h5"
    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Parts, "write", killed_in_batch(number, torn=torn))
            embed(fasta, tiny_run, output, OPTIONS)
        assert not output.exists()
    capsys.readouterr()
    embed(fasta, tiny_run, output, OPTIONS)
    first, *_ = capsys.readouterr().err.splitlines()
    assert first == f"continuing {output}.partial: {2 * number} batches are finished"
    assert output.read_bytes() == undisturbed
    assert not (tmp_path / "out.h5.partial").exists()


def test_a_command_killed_while_it_writes_the_output_computes_nothing_again(
    fasta: Path,
    undisturbed: bytes,
    tiny_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def die(*_: object, **__: object) -> None:
        raise Killed

    output = tmp_path / "out.h5"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(hdf5, "_add", die)
        embed(fasta, tiny_run, output, OPTIONS)
    monkeypatch.setattr(Embedder, "vectors", die)
    embed(fasta, tiny_run, output, OPTIONS)
    assert output.read_bytes() == undisturbed


def test_a_damaged_batch_is_computed_again(
    fasta: Path,
    undisturbed: bytes,
    tiny_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Parts, "write", killed_in_batch(4, torn=False))
        embed(fasta, tiny_run, tmp_path / "out.h5", OPTIONS)
    part = tmp_path / "out.h5.partial" / "000000.part"
    content = bytearray(part.read_bytes())
    content[100] ^= 1
    part.write_bytes(content)
    embed(fasta, tiny_run, tmp_path / "out.h5", OPTIONS)
    assert (tmp_path / "out.h5").read_bytes() == undisturbed


def test_unfinished_results_of_another_command_are_refused(
    fasta: Path,
    tiny_run: Path,
    train_tiny: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output, folder = tmp_path / "out.h5", tmp_path / "out.h5.partial"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Parts, "write", killed_in_batch(3, torn=False))
        embed(fasta, tiny_run, output, OPTIONS)
    other = EmbedOptions(include=OPTIONS.include, tokens_per_batch=250, dtype=Dtype.float16)
    says = rf"begun with --dtype float32, not float16: .* or remove {folder} to start"
    with pytest.raises(UserError, match=says):
        embed(fasta, tiny_run, output, other)
    another = train_tiny(tmp_path / tiny_run.name, "seed=1", "trainer.max_steps=2")
    with pytest.raises(UserError, match="begun with the model "):
        embed(fasta, another, output, OPTIONS)
    content = fasta.read_text()
    fasta.write_text(content + ">more\nMKV\n")
    with pytest.raises(UserError, match="begun with the sequence file "):
        embed(fasta, tiny_run, output, OPTIONS)
    fasta.write_text(content)
    (folder / BEGUN).write_text("{")
    with pytest.raises(InputDataError, match=rf"is not JSON: .*; remove {folder} to start over"):
        embed(fasta, tiny_run, output, OPTIONS)


def test_ctrl_c_says_how_to_continue(
    fasta: Path,
    tiny_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Parts, "write", interrupt)
    with pytest.raises(InterruptedJobError, match="the same command continues") as caught:
        embed(fasta, tiny_run, tmp_path / "out.h5", OPTIONS)
    assert caught.value.exit_code == ExitCode.INTERRUPTED
    # Nothing was finished, and nothing is left.
    assert [path.name for path in tmp_path.iterdir()] == ["x.fasta"]


def test_ctrl_c_is_one_sentence_and_a_dry_run_counts_what_is_finished(
    fasta: Path,
    tiny_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write, written = Parts.write, []

    def interrupt(self: Parts, *content: Any) -> None:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(write(self, *content))

    with monkeypatch.context() as patch, pytest.raises(InterruptedJobError):
        patch.setattr(Parts, "write", interrupt)
        embed(fasta, tiny_run, tmp_path / "out.h5", OPTIONS)
    assert "kept in" not in capsys.readouterr().err
    monkeypatch.setattr(estimate, "_pass", lambda job, sequences: 1.0)
    for name in ("out.h5", "other.h5"):
        embed(fasta, tiny_run, tmp_path / name, replace(OPTIONS, dry_run=True))
    one, other = capsys.readouterr().out.split("records ")[1:]
    assert re.search(r"finished +3 of \d+ batches", one)
    assert "finished" not in other
    with pytest.raises(UserError, match="begun with --dtype"):
        narrow = replace(OPTIONS, dry_run=True, dtype=Dtype.float16)
        embed(fasta, tiny_run, tmp_path / "out.h5", narrow)


def test_two_commands_do_not_compute_the_same(
    fasta: Path, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Parts.write

    def meanwhile(self: Parts, *content: object) -> None:
        monkeypatch.setattr(Parts, "write", write)
        with pytest.raises(OutputError, match="is being computed by process"):
            embed(fasta, tiny_run, tmp_path / "out.h5", OPTIONS)
        write(self, *content)  # type: ignore[arg-type]

    monkeypatch.setattr(Parts, "write", meanwhile)
    embed(fasta, tiny_run, tmp_path / "out.h5", OPTIONS)
    assert (tmp_path / "out.h5").exists()


def test_a_file_that_changes_meanwhile_is_noticed(
    fasta: Path, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Parts.write

    def change(self: Parts, *content: object) -> None:
        fasta.write_text(fasta.read_text().replace(">P39\n", ">P39\nW"))
        monkeypatch.setattr(Parts, "write", write)
        write(self, *content)  # type: ignore[arg-type]

    monkeypatch.setattr(Parts, "write", change)
    with pytest.raises(InputDataError, match="has changed while it was read"):
        embed(fasta, tiny_run, tmp_path / "out.h5", OPTIONS)
    assert not (tmp_path / "out.h5").exists()


def test_equal_sequences_are_computed_once(
    fasta: Path, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors, seen = Embedder.vectors, []

    def count(self: Embedder, sequences: list[str], *rest: list) -> list:
        seen.extend(sequences)
        return vectors(self, sequences, *rest)

    monkeypatch.setattr(Embedder, "vectors", count)
    embed(fasta, tiny_run, tmp_path / "out.h5", OPTIONS)
    assert len(seen) == len(set(seen)) == 30
    with h5py.File(tmp_path / "out.h5") as file:
        assert list(file) == [f"P{i}" for i in range(40)]
        for i in range(10):
            equal, first = file[f"P{30 + i}/mean/2"], file[f"P{i}/mean/2"]
            assert np.array_equal(equal[:], first[:])
            assert equal.attrs["original_id"] == f"P{30 + i}"


def test_the_places_in_the_plan_do_not_overlap() -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 500, 300)
    first = first_equal(rng.integers(0, 250, (300, 1)).astype(np.uint8).repeat(16, 1))
    made = Plan(lengths, first, lengths * 4, 2_000)
    spans = sorted({made.place(record) for record in range(300)})
    for one, other in pairwise(spans):
        assert one.unit < other.unit or one.offset + one.num_bytes <= other.offset
    assert len(spans) == len(set(first.tolist()))
    assert json.dumps(made.batches(0)) == json.dumps(made.batches(0))
