"""`protlm embed` divided between processes, its estimate, and devices without enough memory."""

import pickle
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import protlm
from protlm.commands.embed import embed
from protlm.commands.embedding import estimate, plan, share_processes
from protlm.commands.embedding.options import EmbedOptions, Share
from protlm.commands.embedding.parts import EMBEDDING, Parts
from protlm.model.embedding import Embedder
from protlm.model.pooling import Pooling
from protlm.model.pretrained import PretrainedModel
from protlm.system.errors import OutputError, UserError, is_full_memory
from protlm.system.shares import Executor, ProcessDiedError, Submission

OPTIONS = {"tokens_per_batch": 250, "include": (Pooling.mean,)}


@pytest.fixture
def fasta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Thirty random proteins in units of seven."""
    monkeypatch.setattr(plan, "_SEQUENCES", 7)
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 90, 30)
    sequences = ["".join(rng.choice(list("ACDEFGHIKL"), n)) for n in lengths]
    path = tmp_path / "x.fasta"
    path.write_text("".join(f">P{i}\n{sequence}\n" for i, sequence in enumerate(sequences)))
    return path


@pytest.mark.parametrize("count", [2, 7])
def test_shares_make_the_bytes_of_one_process(
    count: int, fasta: Path, tiny_run: Path, tmp_path: Path
) -> None:
    embed(fasta, tiny_run, tmp_path / "whole.h5", EmbedOptions(**OPTIONS))
    output = tmp_path / "out.h5"
    merge = EmbedOptions(**OPTIONS, merge=True)
    with pytest.raises(UserError, match=r"no folder .*out.h5.partial; first run every share"):
        embed(fasta, tiny_run, output, merge)
    # In any order, and one of them twice.
    for number in [*range(count, 1, -1), 2]:
        embed(fasta, tiny_run, output, EmbedOptions(**OPTIONS, share=Share(number, count)))
    with pytest.raises(UserError, match=r"batches in .* are not finished: run every --shard"):
        embed(fasta, tiny_run, output, merge)
    embed(fasta, tiny_run, output, EmbedOptions(**OPTIONS, share=Share(1, count)))
    assert not output.exists()
    embed(fasta, tiny_run, output, merge)
    assert output.read_bytes() == (tmp_path / "whole.h5").read_bytes()
    assert not (tmp_path / "out.h5.partial").exists()


def jobs(job: Callable[[EmbedOptions, Callable[[Any], None]], None]) -> Submission:
    """Runs jobs in this process, as if each were sent to another machine."""

    class Jobs(Submission):
        def run(self, function: Any, items: Sequence[Any], folder: Path, cores: int = 1) -> None:
            assert folder.is_dir()
            for item in items:
                job(item, pickle.loads(pickle.dumps(function)))

    return Jobs(Executor.SLURM)


def test_jobs_make_the_bytes_of_one_process(fasta: Path, tiny_run: Path, tmp_path: Path) -> None:
    """After an error the same command continues."""
    embed(fasta, tiny_run, tmp_path / "whole.h5", EmbedOptions(**OPTIONS))
    output, lost, computed = tmp_path / "out.h5", [2], []
    options = EmbedOptions(**OPTIONS, processes=3)

    def job(mine: EmbedOptions, compute: Callable[[EmbedOptions], None]) -> None:
        assert mine.share is not None
        if mine.share.number in lost:
            lost.clear()
            raise ProcessDiedError("a job ended prematurely")
        computed.append(mine.share)
        compute(mine)

    with pytest.raises(ProcessDiedError):
        embed(fasta, tiny_run, output, options, jobs(job))
    assert not output.exists()
    embed(fasta, tiny_run, output, options, jobs(job))
    assert computed == [Share(number, 3) for number in (1, 1, 2, 3)]
    assert output.read_bytes() == (tmp_path / "whole.h5").read_bytes()
    assert not list(tmp_path.glob("out.h5.*"))
    with pytest.raises(UserError, match="--executor computes and merges all shares"):
        embed(fasta, tiny_run, tmp_path / "x.h5", EmbedOptions(merge=True), jobs(job))
    with pytest.raises(UserError, match="--executor reads the sequences several times"):
        embed(Path("-"), tiny_run, tmp_path / "x.h5", options, jobs(job))


def test_a_folder_of_others_is_not_removed(fasta: Path, tiny_run: Path, tmp_path: Path) -> None:
    (tmp_path / "out.h5.jobs").mkdir()
    mine = tmp_path / "out.h5.jobs" / "notes.txt"
    mine.write_text("keep")
    options = EmbedOptions(**OPTIONS, processes=2)
    with pytest.raises(OutputError, match=r"out\.h5\.jobs exists and is not a folder of jobs"):
        embed(fasta, tiny_run, tmp_path / "out.h5", options, jobs(lambda *_: None))
    assert mine.read_text() == "keep"


def test_the_parts_of_jobs_are_joined_without_their_device(
    fasta: Path, tiny_run: Path, tmp_path: Path
) -> None:
    """A login node has no GPU: the jobs compute on another device than the merge."""
    options = EmbedOptions(**{**OPTIONS, "device": "cuda:7"}, processes=2)

    def elsewhere(mine: EmbedOptions, compute: Callable[[EmbedOptions], None]) -> None:
        assert mine.device == "cuda:7"
        compute(replace(mine, device="cpu"))

    embed(fasta, tiny_run, tmp_path / "out.h5", options, jobs(elsewhere))
    embed(fasta, tiny_run, tmp_path / "whole.h5", EmbedOptions(**OPTIONS))
    assert (tmp_path / "out.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()


def test_a_small_file_has_a_part_for_several_processes() -> None:
    """And a large one units as large as before."""
    for number, units in ((100, 1), (1_000, 3), (10_000, 16), (100_000, 49)):
        lengths = np.full(number, 10)
        made = plan.Plan(lengths, np.arange(number), lengths, 4_096).units
        assert len(made) == units and sum(map(len, made)) == number


def test_another_division_continues(fasta: Path, tiny_run: Path, tmp_path: Path) -> None:
    embed(fasta, tiny_run, tmp_path / "whole.h5", EmbedOptions(**OPTIONS))
    embed(fasta, tiny_run, tmp_path / "out.h5", EmbedOptions(**OPTIONS, share=Share(1, 3)))
    embed(fasta, tiny_run, tmp_path / "out.h5", EmbedOptions(**OPTIONS))
    assert (tmp_path / "out.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()


def test_the_space_of_what_a_command_adds_is_required(
    fasta: Path, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = fasta.read_text()
    # Equal sequences take space in the output alone.
    fasta.write_text(records + records.replace(">", ">again-"))
    output, vector = tmp_path / "out.h5", 64 * 4

    def needs(num_vectors: int, **options: Any) -> None:
        usage, free = shutil.disk_usage(tmp_path), num_vectors * vector
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free - 1))
            with pytest.raises(OutputError, match=rf"need {free / 1e3:.1f} kB more, and \d.* kB"):
                embed(fasta, tiny_run, output, EmbedOptions(**OPTIONS, **options))

    needs(30 + 60)
    # Units of 7, 7, 7, 7 and 2.
    needs(7 + 7 + 2, share=Share(1, 2))
    embed(fasta, tiny_run, output, EmbedOptions(**OPTIONS, share=Share(1, 2)))
    needs(14 + 60)
    needs(14, share=Share(2, 2))
    embed(fasta, tiny_run, output, EmbedOptions(**OPTIONS, share=Share(2, 2)))
    needs(60, merge=True)


@pytest.mark.parametrize("merge", [False, True])
def test_the_output_is_not_written_while_a_share_is_computed(
    merge: bool, fasta: Path, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, share = tmp_path / "out.h5", EmbedOptions(**OPTIONS, share=Share(1, 2))
    write = Parts.write

    def meanwhile(self: Parts, *content: Any) -> None:
        monkeypatch.setattr(Parts, "write", write)
        with pytest.raises(OutputError, match="share-1-of-2 is being computed by process"):
            embed(fasta, tiny_run, output, EmbedOptions(**OPTIONS, merge=merge))
        write(self, *content)

    monkeypatch.setattr(Parts, "write", meanwhile)
    embed(fasta, tiny_run, output, share)
    embed(fasta, tiny_run, output, EmbedOptions(**OPTIONS))
    assert [path.name for path in tmp_path.iterdir() if path.name != "x.fasta"] == ["out.h5"]


def test_the_output_is_not_written_after_another_share_has_begun(
    fasta: Path, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, begun = Parts.write, []

    def begin(self: Parts, *content: Any) -> None:
        if not begun:
            (self.folder / "share-2-of-2").mkdir()
            begun.append(EMBEDDING.lock(self.folder / "share-2-of-2", break_lock=False))
        write(self, *content)

    monkeypatch.setattr(Parts, "write", begin)
    with pytest.raises(OutputError, match="share-2-of-2 is being computed by process"):
        embed(fasta, tiny_run, tmp_path / "out.h5", EmbedOptions(**OPTIONS))
    assert not (tmp_path / "out.h5").exists()
    assert (tmp_path / "out.h5.partial").exists()
    begun[0].release()
    embed(fasta, tiny_run, tmp_path / "out.h5", EmbedOptions(**OPTIONS))
    assert not (tmp_path / "out.h5.partial").exists()


@pytest.mark.slow
def test_processes_make_the_bytes_of_one_process(
    tiny_fasta: Path, tiny_run: Path, tmp_path: Path
) -> None:
    """Local jobs are processes."""
    embed(tiny_fasta, tiny_run, tmp_path / "whole.h5", EmbedOptions(**OPTIONS))
    options = EmbedOptions(**OPTIONS, processes=2)
    embed(tiny_fasta, tiny_run, tmp_path / "out.h5", options, Submission(Executor.LOCAL))
    assert (tmp_path / "out.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"whole.h5", "out.h5"}


def test_processes_divide_the_gpus_and_the_threads(
    fasta: Path, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share_processes, "pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    devices, threads = [], []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)

    def here(function: Any, shares: Sequence[EmbedOptions], *_: Any) -> list[int]:
        devices.extend(share.device for share in shares)
        return [function(replace(share, device="cpu")) for share in shares]

    monkeypatch.setattr(share_processes, "here", here)
    embed(fasta, tiny_run, tmp_path / "out.h5", EmbedOptions(**OPTIONS, processes=3))
    assert (devices, threads) == (["cuda:0", "cuda:1", "cuda:0"], [2, 2, 2])
    assert (tmp_path / "out.h5").is_file()
    assert share_processes.device_of("cuda:1", 1) == "cuda:1"
    with pytest.raises(UserError, match="--processes reads the sequences several times"):
        embed(Path("-"), tiny_run, tmp_path / "x.h5", EmbedOptions(processes=2))


def test_a_dry_run_says_what_is_needed_and_writes_nothing(
    fasta: Path,
    tiny_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fasta.write_text(fasta.read_text() + f">titin\n{'MKV' * 12_000}\n>bad\nM?\n>P30\nM\n>P31\nM\n")
    monkeypatch.setattr(estimate, "_LENGTHS", (16, 32, 64))
    # The model needs some kilobytes for a residue.
    monkeypatch.setattr(estimate, "free_memory", lambda device: 2_000_000)
    embed(fasta, tiny_run, tmp_path / "out.h5", EmbedOptions(**OPTIONS, dry_run=True))
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert said["records"] == "34, of them 33 to embed"
    assert said["distinct"] == "sequences  32"
    assert said["longest"] == "36,000 residues"
    assert said["output"].startswith(f"{33 * 64 * 4 / 1e3:.1f} kB")
    assert re.match(r"about \d+:\d\d:\d\d on cpu", said["time"])
    assert re.match(r"about .* for the largest batch, 2.0 MB are free", said["memory"])
    assert said["will"].startswith("not fit        titin, 36,000 residues: about ")
    assert [path.name for path in tmp_path.iterdir()] == ["x.fasta"]


def test_the_estimates_grow_linearly_or_not_at_all() -> None:
    sizes = [128, 512, 2_048]
    assert np.polyval(estimate._line(sizes, [3.0, 3.1, 3.2]), 10**6) == pytest.approx(3.1)
    line = estimate._line(sizes, [1.128, 1.512, 3.048])
    assert np.polyval(line, 10_000) == pytest.approx(11)


def limit_memory(monkeypatch: pytest.MonkeyPatch, tokens: int) -> list[int]:
    """Lets passes of more tokens fail; returns the list of the tokens of all passes."""
    states, seen = PretrainedModel.hidden_states, list[int]()

    def or_fail(self: PretrainedModel, batch: object, layers: tuple[int, ...]) -> object:
        seen.append(batch.tokens_BL.numel())  # type: ignore[attr-defined]
        if seen[-1] > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return states(self, batch, layers)  # type: ignore[arg-type]

    monkeypatch.setattr(PretrainedModel, "hidden_states", or_fail)
    return seen


def test_a_batch_that_does_not_fit_is_halved_and_reported(
    fasta: Path,
    tiny_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    embed(fasta, tiny_run, tmp_path / "whole.h5", EmbedOptions(**OPTIONS))
    capsys.readouterr()
    seen = limit_memory(monkeypatch, 130)
    embed(fasta, tiny_run, tmp_path / "out.h5", EmbedOptions(**OPTIONS))
    halved = sum(tokens > 130 for tokens in seen)
    said = capsys.readouterr().err
    assert f"the memory of the device was full: {halved} batches were halved" in said
    assert "30 records: 30 embedded, 0 skipped" in said
    with h5py.File(tmp_path / "whole.h5") as whole, h5py.File(tmp_path / "out.h5") as file:
        assert list(file) == list(whole)
        for name in whole:
            np.testing.assert_allclose(file[name][:], whole[name][:], atol=1e-5)


def test_a_protein_that_does_not_fit_is_reported(
    fasta: Path,
    tiny_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    limit_memory(monkeypatch, 70)
    embed(fasta, tiny_run, tmp_path / "out.h5", EmbedOptions(**OPTIONS))
    long = [
        name[1:]
        for name, sequence in zip(*[iter(fasta.read_text().splitlines())] * 2, strict=True)
        if len(sequence) + 2 > 70
    ]
    said = capsys.readouterr().err
    assert f"30 records: {30 - len(long)} embedded, {len(long)} skipped" in said
    for name in long:
        assert re.search(
            rf"skipped {name}: \d+ residues do not fit into the memory of the device", said
        )
    with h5py.File(tmp_path / "out.h5") as file:
        assert set(file) == {f"P{i}" for i in range(30)} - set(long)
        assert [row["identifier"].decode() for row in file.attrs["skipped"]] == long


def test_a_protein_that_did_not_fit_is_computed_again(
    fasta: Path, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed(fasta, tiny_run, tmp_path / "whole.h5", EmbedOptions(**OPTIONS))
    output, shares = tmp_path / "out.h5", [Share(1, 2), Share(2, 2)]
    with monkeypatch.context() as patch:
        limit_memory(patch, 70)
        for share in shares:
            embed(fasta, tiny_run, output, EmbedOptions(**OPTIONS, share=share))
    passes = limit_memory(monkeypatch, 1_000)
    for share in shares:
        embed(fasta, tiny_run, output, EmbedOptions(**OPTIONS, share=share))
    assert max(passes) > 70
    embed(fasta, tiny_run, output, EmbedOptions(**OPTIONS, merge=True))
    assert output.read_bytes() == (tmp_path / "whole.h5").read_bytes()


def test_other_errors_are_not_taken_for_a_full_memory(tiny_run: Path) -> None:
    assert is_full_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert not is_full_memory(RuntimeError("shapes cannot be multiplied"))
    model = protlm.load(tiny_run)
    with pytest.raises(UserError, match="layer 9 does not exist"):
        Embedder(model, (Pooling.mean,), (9,)).vectors(["MKV"])
