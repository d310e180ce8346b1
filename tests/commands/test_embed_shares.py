"""`protlm embed` interrupted, divided between processes, and on devices without enough memory."""

import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest
import torch

from protlm.analysis import pace
from protlm.commands import embed as embed_module
from protlm.commands.embed import embed, plan_job
from protlm.commands.embedding import estimate, plan, results
from protlm.commands.embedding.formats import hdf5
from protlm.commands.embedding.results import Blocks
from protlm.model.embedding import Embedder
from protlm.model.pretrained import PretrainedModel, TokenBatch
from protlm.options.embed import Dtype, EmbedOptions, Pooling
from protlm.options.jobs import Executor, Share, Submission
from protlm.system.errors import InputDataError, OutputError, UserError
from protlm.system.parts import read_part
from protlm.system.shares import ProcessDiedError
from tests.fixtures.calls import watched
from tests.fixtures.runs import RUN, Killed, Train

OPTIONS = EmbedOptions(include=(Pooling.mean, Pooling.per_tok), tokens_per_batch=250)
FASTA, OUTPUT, PARTIAL = Path("x.fasta"), Path("out.h5"), Path("out.h5.partial")


@pytest.fixture(autouse=True)
def fasta(own_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty random proteins, ten of them equal to others, in groups of seven, of two blocks."""
    monkeypatch.setattr(plan, "_SEQUENCES", 7)
    monkeypatch.setattr(plan, "_BLOCK_RESIDUES", 150)
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 90, 30)
    sequences = ["".join(rng.choice(list("ACDEFGHIKLMNPQRSTVWY"), n)) for n in lengths]
    sequences += sequences[:10]
    FASTA.write_text("".join(f">P{i}\n{sequence}\n" for i, sequence in enumerate(sequences)))


def embedded(name: str = "out.h5", submission: Submission | None = None, **options: Any) -> Path:
    """Embeds the proteins."""
    embed(FASTA, RUN, Path(name), replace(OPTIONS, **options), submission)
    return Path(name)


def files() -> set[str]:
    """What is in the folder."""
    return {path.name for path in Path().iterdir()}


@pytest.fixture
def undisturbed() -> bytes:
    """The output of a command that is not interrupted."""
    content = embedded().read_bytes()
    assert files() == {"x.fasta", "out.h5"}
    OUTPUT.unlink()
    return content


def at_block(patch: pytest.MonkeyPatch, number: int, act: Callable[[Blocks], object]) -> None:
    """Does something once a block, counted from 0, has its first vectors."""
    write, count = Blocks.write, iter(range(1_000))

    def disturbed(vectors: Iterator[Any], blocks: Blocks) -> Iterator[Any]:
        yield next(vectors)
        act(blocks)
        yield from vectors

    def write_and_act(self: Blocks, block: plan.Block, vectors: Iterator[Any]) -> None:
        write(self, block, disturbed(vectors, self) if next(count) == number else vectors)

    patch.setattr(Blocks, "write", write_and_act)


def die(*_: object, **__: object) -> None:
    raise Killed


def disturb(number: int, act: Callable[[Blocks], object], error: type) -> None:
    """Embeds until something happens in a block."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(error):
        at_block(patch, number, act)
        embedded()


@pytest.mark.parametrize("number", [1, 3])
def test_a_killed_command_continues_to_the_same_bytes(
    number: int, undisturbed: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        disturb(number, die, Killed)
        assert not OUTPUT.exists()
    # What a killed process leaves.
    (PARTIAL / f".{2 * number:06d}.vectors.part").write_text("a beginning")
    capsys.readouterr()
    output = embedded()
    first, *_ = capsys.readouterr().err.splitlines()
    blocks = plan_job([FASTA], RUN, OPTIONS).plan.blocks[: 2 * number]
    finished = sum(len(block.batches) for block in blocks)
    assert first == f"continuing {output}.partial: {finished} batches are finished"
    assert output.read_bytes() == undisturbed
    assert not PARTIAL.exists()


def test_a_command_killed_while_it_writes_the_output_computes_nothing_again(
    undisturbed: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mock.patch.object(hdf5, "_add", die), pytest.raises(Killed):
        embedded()
    monkeypatch.setattr(Embedder, "vectors", die)
    assert embedded().read_bytes() == undisturbed


@pytest.mark.parametrize("size", [100, None])
def test_a_damaged_part_is_computed_again(
    size: int | None, undisturbed: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    disturb(4, die, Killed)
    block = PARTIAL / "000000.vectors"
    content = bytearray(block.read_bytes())
    content[99] ^= 1
    block.write_bytes(content[:size])
    assert embedded().read_bytes() == undisturbed
    assert f"{block} is damaged" in capsys.readouterr().err


def test_a_block_is_verified_once(undisturbed: bytes, look_at: Callable[..., None]) -> None:
    """And what a process has written itself not again."""
    disturb(3, die, Killed)
    read: list[Path] = []
    look_at(results, "read_part", read.append)
    assert embedded().read_bytes() == undisturbed
    assert sorted(read)[:3] == [PARTIAL / f"{number:06d}.vectors" for number in range(3)]
    assert len(read) == len({*read})


def test_unfinished_results_of_another_command_are_refused(train_tiny: Train) -> None:
    disturb(3, die, Killed)
    says = rf"begun with --dtype float32, not float16: .* or remove {PARTIAL} to start"
    for more in ({}, {"dry_run": True}):
        with pytest.raises(UserError, match=says):
            embedded(dtype=Dtype.float16, **more)
    another = train_tiny(Path("other/run"), "seed=1", "trainer.max_steps=2")
    with pytest.raises(UserError, match="begun with the model "):
        embed(FASTA, another, OUTPUT, OPTIONS)
    FASTA.write_text(f"{FASTA.read_text()}>more\nMKV\n")
    with pytest.raises(UserError, match="begun with the sequence file "):
        embedded()


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [({}, {}), ({"share": Share(1, 2)}, {}), ({"share": Share(1, 2)}, {"merge": True})],
)
def test_two_commands_do_not_compute_the_same(
    mine: dict[str, Any], theirs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the output is not written while a share is computed."""

    def meanwhile(_: Blocks) -> None:
        with pytest.raises(OutputError, match="is being computed by process") as refused:
            embedded(**theirs)
        assert ("share-1-of-2" in str(refused.value)) == bool(mine)

    at_block(monkeypatch, 0, meanwhile)
    embedded(**mine)
    if mine:
        embedded()
    assert files() == {"out.h5", "x.fasta"}


def test_a_file_that_changes_meanwhile_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    content = FASTA.read_text()
    at_block(monkeypatch, 0, lambda _: FASTA.write_text(content.replace(">P39\n", ">P39\nW")))
    with pytest.raises(InputDataError, match="has changed while it was read"):
        embedded()
    assert not OUTPUT.exists()


def test_equal_sequences_are_computed_once(look_at: Callable[..., None]) -> None:
    seen: list[str] = []
    look_at(Embedder, "vectors", lambda _, sequences, *rest: seen.extend(sequences))
    with h5py.File(embedded()) as file:
        assert len(seen) == len(set(seen)) == 30
        assert list(file) == [f"P{i}" for i in range(40)]
        for i in range(10):
            equal, first = file[f"P{30 + i}/mean/2"], file[f"P{i}/mean/2"]
            assert np.array_equal(equal[:], first[:])
            assert equal.attrs["original_id"] == f"P{30 + i}"


@pytest.mark.parametrize("count", [2, 7])
def test_shares_make_the_bytes_of_one_process(count: int, undisturbed: bytes) -> None:
    with pytest.raises(UserError, match=r"no folder .*out.h5.partial; first run every share"):
        embedded(merge=True)
    # Of another division; in any order; and one of them twice.
    embedded(share=Share(1, 3))
    for number in [*range(count, 1, -1), 2]:
        embedded(share=Share(number, count))
    with pytest.raises(UserError, match=r"batches in .* are not finished: run every --shard"):
        embedded(merge=True)
    assert not embedded(share=Share(1, count)).exists()
    assert embedded(merge=True).read_bytes() == undisturbed
    assert not PARTIAL.exists()


def jobs(job: Callable[[EmbedOptions, Callable[[Any], None]], None]) -> Submission:
    """Runs jobs in this process, as if each were sent to another machine."""
    checked: list[bool] = []

    class Jobs(Submission):
        def check(self) -> None:
            checked.append(True)

        def run(self, function: Any, items: Sequence[Any], folder: Path, cores: int = 1) -> None:
            assert folder.is_dir() and checked
            for item in items:
                job(item, pickle.loads(pickle.dumps(function)))

    return Jobs(Executor.slurm)


def test_jobs_make_the_bytes_of_one_process(undisturbed: bytes) -> None:
    """After an error the same command continues; a login node need not have the jobs' GPUs."""
    lost, computed = [2], []

    def job(mine: EmbedOptions, compute: Callable[[EmbedOptions], None]) -> None:
        assert mine.device == "cuda:7"
        if mine.share.number in lost:
            lost.clear()
            raise ProcessDiedError("a job ended prematurely")
        computed.append(mine.share)
        compute(replace(mine, device="cpu"))

    with pytest.raises(ProcessDiedError):
        embedded(submission=jobs(job), processes=3, device="cuda:7")
    assert not OUTPUT.exists()
    output = embedded(submission=jobs(job), processes=3, device="cuda:7")
    assert computed == [Share(number, 3) for number in (1, 1, 2, 3)]
    assert output.read_bytes() == undisturbed
    assert not list(Path().glob("out.h5.*"))


def test_a_folder_that_is_not_of_jobs_is_kept() -> None:
    Path("out.h5.jobs").mkdir()
    with pytest.raises(OutputError, match=r"out\.h5\.jobs exists and is not a folder of jobs"):
        embedded(submission=jobs(lambda *_: None), processes=2)


def test_the_space_of_what_a_command_adds_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal sequences take space in the output alone."""
    monkeypatch.setattr(plan, "_BLOCK_RESIDUES", 1 << 15)
    mean, vector = {"include": (Pooling.mean,)}, 64 * 4

    def needs(num_vectors: int, **options: Any) -> None:
        usage, free = shutil.disk_usage("."), num_vectors * vector
        with (
            mock.patch.object(shutil, "disk_usage", lambda _: usage._replace(free=free - 1)),
            pytest.raises(OutputError, match=rf"need {free / 1e3:.1f} kB more, and \d.* kB"),
        ):
            embedded(**mean, **options)

    needs(30 + 40)
    # Blocks of 7, 7, 7, 7 and 2.
    needs(7 + 7 + 2, share=Share(1, 2))
    embedded(**mean, share=Share(1, 2))
    needs(14 + 40)
    needs(14, share=Share(2, 2))
    embedded(**mean, share=Share(2, 2))
    needs(40, merge=True)
    # A block that is cut off is written again.
    (PARTIAL / "000003.vectors").write_bytes(b"")
    needs(7 + 40)


def test_processes_divide_the_gpus_and_the_threads(
    undisturbed: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embed_module, "pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    devices, threads = [], []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)

    def here(function: Any, shares: Sequence[EmbedOptions], *_: Any) -> list[int]:
        devices.extend(share.device for share in shares)
        return [function(replace(share, device="cpu")) for share in shares]

    monkeypatch.setattr(embed_module, "here", here)
    assert embedded(processes=3).read_bytes() == undisturbed
    assert (devices, threads) == (["cuda:0", "cuda:1", "cuda:0"], [2, 2, 2])
    assert embed_module.device_of("cuda:1", 1) == "cuda:1"


def test_a_dry_run_says_what_is_needed_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    FASTA.write_text(FASTA.read_text() + f">titin\n{'MKV' * 12_000}\n>bad\nM?\n>P40\nM\n>P41\nM\n")
    monkeypatch.setattr(pace, "_LENGTHS", (16, 32, 64))
    # The model needs some kilobytes for a residue.
    monkeypatch.setattr(estimate, "free_memory", lambda device: 2_000_000)
    embedded(dry_run=True, include=(Pooling.mean,))
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert said.items() >= {
        ("records", "44, of them 43 to embed"),
        ("distinct", "sequences  32"),
        ("longest", "36,000 residues"),
        ("will", "not fit        1 of 43 proteins, of 36,000 residues and more"),
    }
    assert said["output"].startswith(f"{43 * 64 * 4 / 1e3:.1f} kB")
    assert re.match(r"about \d+:\d\d:\d\d on cpu", said["time"])
    assert re.match(r"about .* for the largest batch, 2.0 MB are free", said["memory"])
    assert files() == {"x.fasta"}


def limit_memory(monkeypatch: pytest.MonkeyPatch, tokens: int) -> list[int]:
    """Lets passes of more tokens fail; returns the list of the tokens of all passes."""
    seen: list[int] = []

    def fail(_: PretrainedModel, batch: TokenBatch, layers: tuple[int, ...]) -> None:
        seen.append(batch.tokens_BL.numel())
        if seen[-1] > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")

    limited = watched(PretrainedModel.hidden_states, fail)
    monkeypatch.setattr(PretrainedModel, "hidden_states", limited)
    return seen


def test_a_batch_that_does_not_fit_is_halved_and_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = embedded("whole.h5")
    seen = limit_memory(monkeypatch, 130)
    output = embedded()
    halved = sum(tokens > 130 for tokens in seen)
    said = capsys.readouterr().err
    assert f"the memory of the device was full: {halved} batches were halved" in said
    assert said.count("40 records: 40 embedded, 0 skipped") == 2
    with h5py.File(whole) as expected, h5py.File(output) as file:
        assert list(file) == list(expected)
        for name, entry in expected.items():
            for kind in ("mean/2", "per_tok/2"):
                np.testing.assert_allclose(file[name][kind][:], entry[kind][:], atol=1e-5)


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.float16])
def test_a_protein_that_does_not_fit_is_reported_and_computed_again(
    dtype: Dtype, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shares = [Share(1, 2), Share(2, 2)]
    with monkeypatch.context() as patch:
        limit_memory(patch, 70)
        output = embedded(dtype=dtype)
        for share in shares:
            embedded("again.h5", dtype=dtype, share=share)
    parts = [read_part(path) for path in Path("again.h5.partial").glob("*.vectors")]
    listed = [number for part in parts if part for number in part.facts["too_large"]]
    lines = FASTA.read_text().splitlines()
    long = [name[1:] for name, text in zip(*[iter(lines)] * 2, strict=True) if len(text) > 68]
    # The last ten are equal to others, and have no vectors of their own.
    assert {f"P{number}" for number in listed} == {name for name in long if int(name[1:]) < 30}
    said = capsys.readouterr().err
    assert f"40 records: {40 - len(long)} embedded, {len(long)} skipped" in said
    for name in long:
        assert re.search(rf"skipped {name}: \d+ residues do not fit into the memory of", said)
    with h5py.File(output) as file:
        assert set(file) == {f"P{i}" for i in range(40)} - set(long)
        assert [row["identifier"].decode() for row in file.attrs["skipped"]] == long
    passes = limit_memory(monkeypatch, 1_000)
    for share in shares:
        embedded("again.h5", dtype=dtype, share=share)
    assert max(passes) > 70
    again = embedded("again.h5", dtype=dtype, merge=True)
    assert again.read_bytes() == embedded("whole.h5", dtype=dtype).read_bytes()
