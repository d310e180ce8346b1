"""Result files on a full disk, by two writers at once, and after a killed writer."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np
import pytest

from protlm.commands.embed import embed
from protlm.commands.embedding.options import EmbedOptions
from protlm.commands.hdf5_output import DiskFile
from protlm.data.records import Tally, read_records
from protlm.data.records.proteins import Duplicates
from protlm.model.pooling import Pooling
from protlm.system.errors import OutputError
from protlm.system.paths import complete_file, complete_folder, sample_dir
from tests.marks import slow_but

PROGRAMS = Path(__file__).parent / "programs"
TINY_FASTA = sample_dir() / "uniprot_tiny.fasta.gz"


@pytest.mark.parametrize("limit", slow_but([0, 100, 20_000, 300_000], 20_000))
@pytest.mark.parametrize("command", slow_but(["embed", "attention"], "embed"))
def test_a_quota_ends_a_command_with_one_sentence(
    command: str, limit: int, tiny_run: Path, one_process: dict[str, str], tmp_path: Path
) -> None:
    arguments = [command, TINY_FASTA, "-m", tiny_run, "-o", tmp_path / "out.h5"]
    if command == "embed":
        arguments += ["--include", "per_tok"]
    done = subprocess.run(
        [sys.executable, PROGRAMS / "limited_protlm.py", str(limit), *map(str, arguments)],
        env=one_process,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 4, done.stderr
    assert "Traceback" not in done.stderr
    assert f"protlm: {tmp_path / 'out.h5'}: no space left" in done.stderr
    # What was finished is kept, and announced.
    kept = [path.name for path in tmp_path.iterdir()]
    assert kept in ([], ["out.h5.partial"])
    assert ("the same command continues" in done.stderr) == bool(kept)


@pytest.mark.slow
def test_a_small_disk_ends_a_command_with_one_sentence(
    tiny_run: Path, protlm_command: Callable, tmp_path: Path, small_disk: Callable
) -> None:
    """As when another process fills the disk after the free space was checked: the estimate is 0.

    Where no disk can be mounted, the size of files is limited.
    """
    with small_disk(tmp_path / "disk", "300k") as is_mounted:
        output = tmp_path / "disk" / "out.h5"
        limit = "-1" if is_mounted else "300000"
        arguments = ["embed", TINY_FASTA, "-m", tiny_run, "-o", output, "--include", "per_tok"]
        done = subprocess.run(
            [sys.executable, PROGRAMS / "protlm_without_estimate.py", limit, *arguments],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, "Traceback" in done.stderr) == (4, False), done.stderr
        assert {path.name for path in output.parent.iterdir()} <= {"out.h5.partial"}


@pytest.mark.parametrize("limit", [0, 1, 700, 5_000, 60_000])
def test_hdf5_reads_its_tables_although_the_disk_is_full(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize("has_links", [True, False])
def test_the_second_of_two_writers_replaces_nothing(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "out.h5"
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


def test_the_files_of_a_killed_writer_are_removed(
    one_process: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "out.h5"
    started = [
        subprocess.Popen(
            [sys.executable, PROGRAMS / "write_slowly.py", path],
            env=one_process,
            stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    killed, alive = started
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        killed.kill()
        killed.wait()
        assert len(list(tmp_path.iterdir())) == 2
        with complete_file(path) as file:
            file.write_text("whole")
        (left,) = [entry for entry in tmp_path.iterdir() if entry != path]
        assert left.name.endswith(f".{alive.pid}.part")
    finally:
        for process in started:
            with suppress(OSError):
                process.kill()
            process.communicate()


def test_impossible_names_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, told in (
        ("link", "link exists already"),
        ("link/out.h5", "link is not a folder"),
        ("x" * 250, r"a name has at most \d+ bytes, as .NAME.*.part is needed"),
    ):
        with pytest.raises(OutputError, match=told), complete_file(tmp_path / name):
            pytest.fail("it was not refused")
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_entries_are_in_the_order_of_the_input(tiny_run: Path, tmp_path: Path) -> None:
    records = list(read_records(TINY_FASTA, Tally()))[:20]
    names = [record.identifier for record in records]
    assert names != [r.identifier for r in sorted(records, key=lambda r: len(r.sequence))]
    fasta = tmp_path / "x.fasta"
    fasta.write_text("".join(f">{r.identifier}\n{r.sequence}\n" for r in records))
    for include in ((Pooling.mean,), (Pooling.mean, Pooling.per_tok, Pooling.bos)):
        output = tmp_path / f"{len(include)}.h5"
        embed(fasta, tiny_run, output, EmbedOptions(include=include, tokens_per_batch=500))
        with h5py.File(output) as file:
            assert list(file) == names


def test_identifiers_and_skipped_records_are_in_the_file(tiny_run: Path, tmp_path: Path) -> None:
    fasta = tmp_path / "x.fasta"
    fasta.write_text(">a/b x\nMKT\n>P1\nMKT\n>P1\nMKV\n>bad\nMK?T\n>N\0L\nMKT\n")
    for how in (Duplicates.suffix, Duplicates.first):
        output = tmp_path / f"{how}.h5"
        embed(fasta, tiny_run, output, EmbedOptions(duplicates=how))
        with h5py.File(output) as file:
            came = [(name, file[name].attrs["original_id"]) for name in file]
            skipped = [
                (row["identifier"], row["reason"]) for row in np.asarray(file.attrs["skipped"])
            ]
        again = [("P1_2", "P1")] if how is Duplicates.suffix else []
        assert came == [("a%2Fb", "a/b"), ("P1", "P1"), *again, ("N%00L", "N\\x00L")]
        bad = [(b"bad", b"character that is not a letter, line 7")]
        assert skipped == (bad if again else [*bad, (b"P1", b"repeated at line 5")])
