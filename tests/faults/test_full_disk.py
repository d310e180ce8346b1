"""On a full or read-only disk a command ends with one sentence, and continues when it can."""

import os
import resource
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from threading import Barrier
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest
import torch

import protlm
from protlm.checkpoints import format as checkpoints
from protlm.checkpoints.format import all_checkpoints
from protlm.commands.embedding.formats import pt
from protlm.commands.hdf5_output import DiskFile
from protlm.data.records import block
from protlm.data_prep import sources
from protlm.data_prep.duplicates import DigestSet
from protlm.data_prep.prepare import prepare
from protlm.data_prep.split import HashSplit
from protlm.options.prepare import PrepareOptions
from protlm.system import paths
from protlm.system.errors import ExitCode, OutputError
from protlm.system.paths import check_output, complete_file, complete_folder
from tests.fixtures.runs import steps_of
from tests.marks import slow_but

# Commands that write to `new/`, and their output.
COMMANDS = {
    "prepare": ("prepare {proteins} --deduplicate --shard-residues 30000 --out new/data", "data"),
    "embed": ("embed {tiny} -m {run} --include per_tok -o new/out.h5", "out.h5"),
    "embed as pt": ("embed {tiny} -m {run} --format pt -o new/out", "out"),
    "attention": ("attention {tiny} -m {run} -o new/out.h5", "out.h5"),
}


@pytest.fixture(scope="module")
def run_command(protlm_in_process, proteins, tiny_fasta, tiny_run) -> Callable:
    """Runs a command of the table in a folder; the blocks of a file are small."""

    def run(name: str, folder: Path, code: int = 0) -> "subprocess.CompletedProcess[str]":
        typed = COMMANDS[name][0].format(proteins=proteins, tiny=tiny_fasta, run=tiny_run)
        (folder / "new").mkdir(exist_ok=True, parents=True)
        with mock.patch.object(block, "BLOCK_BYTES", 1 << 14):
            return protlm_in_process(*typed.split(), cwd=folder, code=code)

    return run


@pytest.fixture(scope="module")
def whole(run_command, contents, tmp_path_factory) -> Callable[[str], dict[str, bytes]]:
    """The output of a command that was not disturbed."""

    @cache
    def read(name: str) -> dict[str, bytes]:
        folder = tmp_path_factory.mktemp("whole")
        run_command(name, folder)
        return contents(folder / "new" / COMMANDS[name][1])

    return read


def assert_one_sentence(done: "subprocess.CompletedProcess[str]", output: Path) -> None:
    """A sentence; what was finished is kept and announced."""
    assert "Traceback" not in done.stderr
    (told,) = [line for line in done.stderr.splitlines() if line.startswith("protlm: ")]
    assert f"new/{output.name}" in told and "no space left" in told
    kept = [path.name for path in output.parent.iterdir()]
    assert kept in ([], [f"{output.name}.partial"])
    announced = "finished parts are kept in", "the same command continues"
    assert any(words in done.stderr for words in announced) == bool(kept)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limits the size of files, which a writer sees as it sees a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_after_the_last_part(run_command, monkeypatch, tmp_path):
    """torch reports a file that it cannot write by an error of its own."""

    @contextmanager
    def narrow(output: Path, **given: Any) -> Iterator[Path]:
        with complete_folder(output, **given) as folder, largest_file(500):
            yield folder

    monkeypatch.setattr(pt, "complete_folder", narrow)
    assert_one_sentence(run_command("embed as pt", tmp_path, 4), tmp_path / "new" / "out")


def test_a_full_work_folder_is_named(protlm_in_process, proteins, tmp_path, monkeypatch):
    """The results of workers go through it."""
    full = Path("/dev/full")
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", lambda **_: full.open("wb", buffering=0))
    typed = ["prepare", proteins, "--workers", "2", "--out", "data"]
    done = protlm_in_process(*typed, cwd=tmp_path, code=ExitCode.OUTPUT)
    told = "protlm: data.partial: no space left; free some or write to another disk"
    assert done.stderr.splitlines()[-1] == told
    assert list(tmp_path.iterdir()) == []


POINTS = list(product(("prepare", "embed", "attention"), (0, 100, 20_000, 300_000)))
POINTS = [(name, size) for name, size in POINTS if (name, size) != ("prepare", 300_000)]


@pytest.mark.parametrize(("name", "size"), slow_but(POINTS, ("prepare", 20_000)))
def test_a_quota_ends_a_command_which_continues_to_the_same_bytes(
    name, size, run_command, whole, contents, tmp_path
):
    output = tmp_path / "new" / COMMANDS[name][1]
    with largest_file(size):
        for _ in range(2):
            stopped = run_command(name, tmp_path, code=4)
            assert_one_sentence(stopped, output)
    partial = output.with_name("data.partial")
    if partial.exists():
        assert "resuming" in stopped.stderr
        assert [p for p in partial.rglob("*") if p.name.endswith(".part")] == []
    run_command(name, tmp_path)
    assert contents(output) == whole(name)
    assert [path.name for path in output.parent.iterdir()] == [output.name]


def test_a_table_of_digests_that_does_not_fit_is_an_error_not_a_crash(tmp_path):
    """Space is allocated when the table is created: a mapped sparse file would cause SIGBUS."""
    rng = np.random.default_rng(0)
    with largest_file(1 << 22), pytest.raises(OSError, match=r"File too large|No space left"):
        known = DigestSet(tmp_path / "table", memory_slots=1 << 16)
        for _ in range(100):
            known.add(rng.integers(0, 2**64, (10_000, 2), np.uint64))


@contextmanager
def as_nobody(folder: Path) -> Iterator[None]:
    """Becomes an unprivileged user, to whom a folder is accessible; root may write anywhere."""
    for parent in [folder, *folder.parents]:
        if parent.stat().st_uid == os.geteuid() and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.mark.parametrize(
    ("closed", "mode", "name"),
    [
        ("locked", 0o555, "locked/data"),
        ("locked", 0o555, "locked/new/data"),
        ("closed", 0o000, "closed/data"),
        ("data.partial", 0o555, "data"),
    ],
)
def test_a_read_only_folder_is_refused_before_the_input_is_read(
    closed, mode, name, tiny_fasta, tmp_path, monkeypatch
):
    monkeypatch.setattr(sources, "SequenceFile", lambda *_: pytest.fail("the input was read"))
    tmp_path.chmod(0o777)
    (tmp_path / closed).mkdir(mode=mode)
    with as_nobody(tmp_path), pytest.raises((OutputError, PermissionError)) as refused:
        prepare([tiny_fasta], tmp_path / name, split_rule=HashSplit(0, 0), options=PrepareOptions())
    if name != "data":
        assert f"{tmp_path / name} cannot be written" in str(refused.value)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("limit", [0, 1, 700, 5_000, 60_000])
def test_hdf5_reads_its_tables_although_the_disk_is_full(limit, tmp_path, monkeypatch):
    """More entries than HDF5 keeps in memory, so that it reads its own tables again."""
    pwrite = os.pwrite

    def refuse(descriptor: int, data: memoryview, place: int) -> int:
        if place + len(data) > limit:
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, data, place)

    monkeypatch.setattr(os, "pwrite", refuse)
    with DiskFile(tmp_path / "x.h5") as disk:
        with h5py.File(disk, "w", libver="v110", track_order=True) as file:
            for number in range(3_000):
                file.create_dataset(f"P{number}", data=np.full(8, number))
            assert np.asarray(file["P7"]).tolist() == [7] * 8
        with pytest.raises(OSError, match="No space left"):
            disk.check()


@pytest.mark.parametrize(
    ("command", "number"),
    [
        ("contacts x.fasta --fit {structures} -o out.h5", 2),
        ("attention x.fasta -o out.h5", 1),
        ("score x.fasta --scan -o out.csv", 1),
    ],
)
def test_all_files_are_there_or_none(
    command, number, tiny_run, few_structures, protlm_in_process, tmp_path, monkeypatch
):
    """The disk is full when the last file is written."""
    (tmp_path / "x.fasta").write_text(">P1\nMKTAYIAKQRQISFVKSHFSRQ\n")
    finished, finish = list[Path](), paths.finish

    def refuse_last(temporary: Path, path: Path, **named: bool) -> None:
        if len(finished) == number:
            raise OSError(28, "No space left on device")
        finish(temporary, path, **named)
        finished.append(path)

    monkeypatch.setattr(paths, "finish", refuse_last)
    typed = command.format(structures=few_structures).split()
    done = protlm_in_process(*typed, "--figure", "out.png", "-m", tiny_run, cwd=tmp_path, code=4)
    assert "no space left" in done.stderr, done.stderr
    assert len(finished) == number
    assert [path.name for path in tmp_path.iterdir()] == ["x.fasta"]


@pytest.mark.parametrize("has_links", [True, False])
def test_the_second_of_two_writers_replaces_nothing(has_links, tmp_path, monkeypatch):
    path = tmp_path / "out.h5"
    if not has_links:
        monkeypatch.setattr(os, "link", mock.Mock(side_effect=PermissionError(1, "not permitted")))
    with pytest.raises(OutputError, match=r"out.h5 exists already"), complete_file(path) as second:
        second.write_text("second")
        path.write_text("first")
    assert path.read_text() == "first"
    with complete_file(tmp_path / "alone") as file:
        file.write_text("alone")
    assert (tmp_path / "alone").read_text() == "alone"
    with pytest.raises(OutputError, match="exists already"), complete_folder(tmp_path / "d") as new:
        (new / "x").write_text("second")
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "x").write_text("first")
    assert (tmp_path / "d" / "x").read_text() == "first"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "d", "out.h5"]


def test_the_files_of_a_killed_writer_are_removed(start_child, tmp_path):
    path = tmp_path / "out.h5"

    def write(ready: Callable[[], None]) -> None:
        with complete_file(path) as file:
            file.write_text("a part")
            ready()

    killed, alive = start_child(write), start_child(write)
    killed.kill()
    killed.join()
    assert len(list(tmp_path.iterdir())) == 2
    with complete_file(path) as file:
        file.write_text("whole")
    (left,) = [entry for entry in tmp_path.iterdir() if entry != path]
    assert f".{alive.pid}." in left.name


def test_of_writers_that_finish_together_one_succeeds(tmp_path):
    """Also if their processes have one number, as in two containers."""
    barrier = Barrier(2)

    def write(number: int) -> str:
        try:
            with complete_file(tmp_path / f"{number}") as file:
                file.write_text("whole")
                barrier.wait(60)
        except OutputError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        for number in range(100):
            first, second = sorted(pool.map(write, [number, number]))
            assert first == "" and "exists already" in second, (number, first)
    assert len(list(tmp_path.iterdir())) == 100


def test_a_name_that_is_too_long_is_refused_before_the_work(tmp_path):
    with pytest.raises(OutputError, match=r"a name has at most \d+ bytes"):
        check_output(tmp_path / ("n" * 250))


SETTINGS = ("trainer.checkpoint_every=1", "trainer.keep_checkpoints=4", "trainer.valid_every=9")


def full_from(step: int, patch: pytest.MonkeyPatch) -> None:
    """Simulates a full disk for checkpoints from a step on."""
    save = torch.save

    def save_a_part(contents: dict[str, Any], file: Any) -> None:
        if contents["global_step"] < step:
            return save(contents, file)
        file.write(b"a part of it")
        raise OSError(28, "No space left on device")

    patch.setattr(checkpoints.torch, "save", save_a_part)


@pytest.mark.slow
def test_a_disk_that_becomes_full_keeps_the_checkpoints_before(train_tiny, tmp_path, state_of):
    run = tmp_path / "run"
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.warns(UserWarning) as warned,
        pytest.raises(OutputError, match="last checkpoint is step 2") as ended,
    ):
        full_from(3, patch)
        train_tiny(run, *SETTINGS)
    assert ended.value.exit_code == ExitCode.OUTPUT
    told = [str(warning.message) for warning in warned]
    assert sum("training continues" in text for text in told) == 1
    assert steps_of(run) == [1, 2]
    assert not list(run.rglob(".*"))
    assert protlm.load(run).hash
    train_tiny(run, *SETTINGS)
    for path in all_checkpoints(train_tiny(tmp_path / "whole", *SETTINGS)):
        assert state_of(run / "checkpoints" / path.name) == state_of(path)
