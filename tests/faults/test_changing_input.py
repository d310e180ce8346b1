"""Input that changes while it is read, or before the build resumes, is rejected."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from protlm.data.records import block
from protlm.data_prep.clusters import ClusterTable
from protlm.data_prep.prepare import prepare
from protlm.data_prep.split import HashSplit
from protlm.options.prepare import PrepareOptions, ReadOptions, Selection
from protlm.system.errors import InputDataError, UserError
from protlm.system.lock import LOCK

RULE = HashSplit(0.1, 0.1)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(block, "BLOCK_BYTES", 1 << 14)


def build(sources: Sequence[Path], out: Path, rule=RULE, clusters=None, **options) -> Path:
    settings = PrepareOptions(**{"shard_residues": 30_000, **options})
    prepare(sources, out, split_rule=rule, clusters=clusters, options=settings)
    return out


class Meddling:
    """A split rule that calls a function at one record."""

    def __init__(self, act: Callable[[], object], at: str = "P1500") -> None:
        self.act, self.at = act, at

    def split_of(self, record, digest):
        if record.identifier == self.at:
            self.act()
        return RULE.split_of(record, digest)

    def notes_of(self, record, split):
        return ()

    def describe(self):
        return RULE.describe()


def stop() -> None:
    raise KeyboardInterrupt


@pytest.fixture
def source(tmp_path, proteins):
    path = tmp_path / "proteins.fasta"
    path.write_bytes(proteins.read_bytes())
    return path


@pytest.fixture
def first(tmp_path):
    """A file that is read before `source`."""
    path = tmp_path / "first.fasta"
    path.write_text("".join(f">F{i}\n{'MKVLAWERT' * 40}\n" for i in range(190)))
    return path


@pytest.fixture
def begun(source, tmp_path):
    """A build that was interrupted halfway."""
    out = tmp_path / "data"
    with pytest.raises(KeyboardInterrupt):
        build([source], out, Meddling(stop))
    assert len(list(out.with_name("data.partial").glob("journal/*"))) > 3
    # Another machine, which cannot check whether the owner is running, may continue.
    assert not (out.with_name("data.partial") / LOCK).exists()
    return out


def append(path):
    with path.open("ab") as file:
        file.write(b">late\nMKV\n")


def rewrite(path):
    os.utime(path, ns=(0, 0))


def truncate(path):
    os.truncate(path, path.stat().st_size - 100)


def unnoticed(change: Callable[[Path], object]) -> Callable[[Path], None]:
    """Changes a file but not its size and modification time."""

    def change_and_date_back(path: Path) -> None:
        status = path.stat()
        change(path)
        os.truncate(path, status.st_size)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    return change_and_date_back


def replace(path, old: bytes, new: bytes):
    path.write_bytes(path.read_bytes().replace(old, new, 1))


@pytest.mark.parametrize("change", [append, rewrite, truncate])
@pytest.mark.parametrize("at", ["P1", "P2700"])
def test_a_source_that_changes_while_it_is_read(source, tmp_path, change, at):
    with pytest.raises(InputDataError, match=r"proteins\.fasta changed while it was read"):
        build([source], tmp_path / "data", Meddling(lambda: change(source), at))
    assert not (tmp_path / "data").exists()


CHANGES = {
    "appended": (append, "has changed since.*: start over"),
    "rewritten": (rewrite, "has changed since.*: start over"),
    "truncated": (truncate, "has changed since.*: start over"),
    "a letter": (
        unnoticed(lambda path: replace(path, b">P0 a", b">P0 A")),
        "differs from what was",
    ),
    "the end": (
        unnoticed(lambda path: path.write_bytes(path.read_bytes()[:20_000].rpartition(b">")[0])),
        "",
    ),
}


@pytest.mark.parametrize(("change", "told"), CHANGES.values(), ids=CHANGES)
def test_a_source_that_changed_before_the_build_is_continued(begun, source, change, told, contents):
    """Also where its size and time are the same, as in a file that grew back with holes."""
    change(source)
    before = contents(begun.with_name("data.partial") / "data")
    with pytest.raises(InputDataError, match=rf"proteins\.fasta.*{told}"):
        build([source], begun)
    assert contents(begun.with_name("data.partial") / "data") == before


@pytest.mark.parametrize("options", [{"restart": True}, {"workers": 2}])
def test_what_may_change(begun, source, contents, options):
    """The number of workers; and everything if the build starts again."""
    if "restart" in options:
        append(source)
    build([source], begun, **options)
    assert contents(begun) == contents(build([source], begun.with_name("whole")))


def test_a_source_that_was_read_is_not_opened_again(first, source, tmp_path, contents):
    out = tmp_path / "data"
    with pytest.raises(KeyboardInterrupt):
        build([first, source], out, Meddling(stop))
    whole = build([first, source], tmp_path / "whole")
    unnoticed(lambda path: path.write_bytes(b"x" * path.stat().st_size))(first)
    with pytest.raises(InputDataError, match=r"first\.fasta, line 1"):
        build([first, source], tmp_path / "new")
    build([first, source], out)
    assert contents(out) == contents(whole)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"shard_residues": 40_000}, "--shard-residues 30000, not 40000"),
        ({"reading": ReadOptions(allow_gaps=True)}, "--allow-gaps off, not on"),
        (
            {"selection": Selection(organisms=("9606", "Homo sapiens"))},
            "--organism nothing, not 9606, Homo sapiens",
        ),
        ({"rule": HashSplit(0.1, 0.2)}, r"split rule test_fraction: 0\.1, not 0\.2"),
    ],
)
def test_a_build_does_not_resume_with_other_settings(begun, source, changed, told):
    with pytest.raises(UserError, match=f"was begun with {told}: .*--restart"):
        build([source], begun, **changed)


def test_a_build_does_not_resume_with_other_sources_or_clusters(begun, source, first, tmp_path):
    (tmp_path / "cluster.tsv").write_text("P0\tP1\n")
    for sources, table, told in (
        ([first], None, f"sources {source}, not {first}"),
        ([source, first], None, "sources nothing, not"),
        ([source], ClusterTable(tmp_path / "cluster.tsv"), "cluster table "),
    ):
        with pytest.raises(UserError, match=rf"begun with {told}.*--restart"):
            build(sources, begun, clusters=table)


def test_a_source_that_was_read_ahead_is_not_yet_finished(first, source, tmp_path, contents):
    """With two workers the reader is in the second file when the first segment is finished."""

    def fail() -> None:
        raise InputDataError("stop here")

    out = tmp_path / "data"
    with pytest.raises(InputDataError, match="stop here"):
        build([first, source], out, Meddling(fail, "F170"), workers=2)
    assert list(out.with_name("data.partial").glob("journal/segment-*"))
    build([first, source], out)
    assert contents(out) == contents(build([first, source], tmp_path / "whole"))


@pytest.fixture
def build_input(monkeypatch, tmp_path):
    """Builds from a file as standard input, and perhaps from further files."""

    def run(out: str, file: Path, *further: Path, rule=RULE) -> Path:
        with file.open("rb") as stream:
            monkeypatch.setattr(sys, "stdin", stream)
            return build([Path("-"), *further], tmp_path / out, rule)

    return run


@pytest.mark.parametrize("is_other", [False, True])
@pytest.mark.parametrize("is_read_to_its_end", [False, True])
def test_standard_input_is_compared_with_that_of_the_interrupted_build(
    first, source, build_input, contents, is_other, is_read_to_its_end, tmp_path, monkeypatch
):
    """A file is identified by its size and time, a stream only by its bytes, from any folder."""
    files = [first, source] if is_read_to_its_end else [source]
    with pytest.raises(KeyboardInterrupt):
        build_input("data", *files, rule=Meddling(stop))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    if is_other:
        unnoticed(lambda path: replace(path, path.read_bytes()[:3], b">Q1"))(files[0])
        told = r"standard input.*differs from what was read before"
        with pytest.raises(InputDataError, match=told):
            build_input("data", *files)
    else:
        assert contents(build_input("data", *files)) == contents(build_input("whole", *files))
