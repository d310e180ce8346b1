"""Input that changes while it is read, or before the build resumes, is rejected."""

import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from protlm.data.records import ReadOptions, block
from protlm.data_prep.encode import Selection
from protlm.data_prep.prepare import PrepareOptions, prepare
from protlm.data_prep.split import HashSplit
from protlm.system.errors import InputDataError, UserError

RULE = HashSplit(0.1, 0.1)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(block, "BLOCK_BYTES", 1 << 14)


def options(**named) -> PrepareOptions:
    return PrepareOptions(shard_residues=30_000, **named)


class Meddling:
    """A split rule that calls a function at one record."""

    def __init__(self, act, at="P1500"):
        self.act, self.at = act, at

    def split_of(self, record, digest):
        if record.identifier == self.at:
            self.act()
        return RULE.split_of(record, digest)

    def notes_of(self, record, split):
        return ()

    def describe(self):
        return RULE.describe()


@pytest.fixture
def source(tmp_path, proteins):
    path = tmp_path / "proteins.fasta"
    path.write_bytes(proteins.read_bytes())
    return path


def stop():
    raise KeyboardInterrupt


@pytest.fixture
def begun(source, tmp_path):
    """A build that was interrupted halfway."""
    out = tmp_path / "data"
    with pytest.raises(KeyboardInterrupt):
        prepare([source], out, split_rule=Meddling(stop), options=options())
    assert len(list(out.with_name("data.partial").glob("journal/*"))) > 3
    return out


def write(path, content):
    """Changes a file but not its modification time."""
    status = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def append(path):
    with path.open("ab") as file:
        file.write(b">late\nMKV\n")


def rewrite(path):
    os.utime(path, ns=(0, 0))


def truncate(path):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)


@pytest.mark.parametrize("change", [append, rewrite, truncate])
@pytest.mark.parametrize("at", ["P1", "P2700"])
def test_a_source_that_changes_while_it_is_read(source, tmp_path, change, at):
    rule = Meddling(lambda: change(source), at)
    with pytest.raises(InputDataError, match=r"proteins\.fasta changed while it was read"):
        prepare([source], tmp_path / "data", split_rule=rule, options=options())
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("change", [append, rewrite, truncate])
def test_a_source_that_changed_before_the_build_is_continued(begun, source, change, contents):
    change(source)
    before = contents(begun.with_name("data.partial") / "data")
    with pytest.raises(InputDataError, match=r"proteins\.fasta has changed since.*--restart"):
        prepare([source], begun, split_rule=RULE, options=options())
    assert contents(begun.with_name("data.partial") / "data") == before


def test_an_interrupted_build_can_start_again(begun, source, contents):
    append(source)
    prepare([source], begun, split_rule=RULE, options=options(restart=True))
    whole = begun.with_name("whole")
    prepare([source], whole, split_rule=RULE, options=options())
    assert contents(begun) == contents(whole)


def test_a_changed_letter_is_found_when_size_and_time_are_the_same(begun, source):
    content = bytearray(source.read_bytes())
    content[20] = ord("W") if content[20] != ord("W") else ord("A")
    write(source, content)
    with pytest.raises(InputDataError, match=r"proteins\.fasta.*differs from what was read before"):
        prepare([source], begun, split_rule=RULE, options=options())


def test_a_file_that_ends_before_the_resumed_position_is_rejected(begun, source):
    status = source.stat()
    source.write_bytes(source.read_bytes()[:20_000].rpartition(b">")[0])
    # A file that grew back to its size with holes.
    with source.open("r+b") as file:
        file.truncate(status.st_size)
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(InputDataError, match=r"proteins\.fasta"):
        prepare([source], begun, split_rule=RULE, options=options())


def test_a_source_that_was_read_is_not_opened_again(source, tmp_path, proteins, contents):
    other = tmp_path / "other.fasta"
    other.write_bytes(b">a\nMKV\n>b\nMKL\n" * 3_000)
    out = tmp_path / "data"
    rule = Meddling(stop)
    with pytest.raises(KeyboardInterrupt):
        prepare([other, source], out, split_rule=rule, options=options())
    whole = tmp_path / "whole"
    prepare([other, source], whole, split_rule=RULE, options=options())
    write(other, b"x" * other.stat().st_size)
    with pytest.raises(InputDataError, match=r"other\.fasta, line 1"):
        prepare([other, source], tmp_path / "new", split_rule=RULE, options=options())
    prepare([other, source], out, split_rule=RULE, options=options())
    assert contents(out) == contents(whole)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"shard_residues": 40_000}, "--shard-residues 30000, not 40000"),
        ({"deduplicate": True}, "--deduplicate off, not on"),
        (
            {"reading": ReadOptions(ignore_trailing_garbage=True)},
            "--ignore-trailing-garbage off, not on",
        ),
        ({"selection": Selection(min_length=5)}, "--min-length nothing, not 5"),
        (
            {"selection": Selection(organisms=("9606", "Homo sapiens"))},
            "--organism nothing, not 9606, Homo sapiens",
        ),
    ],
)
def test_a_build_does_not_resume_with_other_settings(begun, source, changed, told):
    settings = PrepareOptions(**{"shard_residues": 30_000, **changed})
    with pytest.raises(UserError, match=f"was begun with {told}: .*--restart"):
        prepare([source], begun, split_rule=RULE, options=settings)


def test_a_build_does_not_resume_with_another_rule_or_other_sources(begun, source):
    told = r"was begun with split rule test_fraction: 0\.1, not 0\.2: .*--restart"
    with pytest.raises(UserError, match=told):
        prepare([source], begun, split_rule=HashSplit(0.1, 0.2), options=options())
    other = source.with_name("other.fasta")
    other.write_text(">P1\nMKV\n")
    for sources, told in (([other], f"{source}, not {other}"), ([source, other], "nothing, not")):
        with pytest.raises(UserError, match=rf"begun with sources {told}.*--restart"):
            prepare(sources, begun, split_rule=RULE, options=options())


def test_the_number_of_workers_may_change(begun, source, tmp_path, contents):
    prepare([source], begun, split_rule=RULE, options=options(workers=2))
    prepare([source], tmp_path / "whole", split_rule=RULE, options=options())
    assert contents(begun) == contents(tmp_path / "whole")


def test_a_source_that_was_read_ahead_is_not_yet_finished(source, tmp_path, contents):
    """With two workers the reader is in the second file when the first segment is finished."""

    def fail():
        raise InputDataError("stop here")

    first = tmp_path / "first.fasta"
    first.write_text("".join(f">F{i}\n{'MKVLAWERT' * 40}\n" for i in range(190)))
    files, out = [first, source], tmp_path / "data"
    with pytest.raises(InputDataError, match="stop here"):
        prepare(files, out, split_rule=Meddling(fail, "F170"), options=options(workers=2))
    assert list(out.with_name("data.partial").glob("journal/segment-*"))
    prepare(files, out, split_rule=RULE, options=options())
    prepare(files, tmp_path / "whole", split_rule=RULE, options=options())
    assert contents(out) == contents(tmp_path / "whole")


def test_standard_input_is_compared_with_that_of_the_interrupted_build(
    source, tmp_path, monkeypatch, contents
):
    def build(out, rule=RULE):
        with source.open("rb") as file:
            monkeypatch.setattr(sys, "stdin", file)
            prepare([Path("-")], tmp_path / out, split_rule=rule, options=options())

    for out in ("data", "other"):
        with pytest.raises(KeyboardInterrupt):
            build(out, Meddling(stop))
    build("data")
    build("whole")
    assert contents(tmp_path / "data") == contents(tmp_path / "whole")
    write(source, source.read_bytes().replace(b"P1 ", b"Q1 ", 1))
    with pytest.raises(InputDataError, match=r"standard input.*differs from what was read before"):
        build("other")


def test_standard_input_is_continued_from_another_folder(source, tmp_path, monkeypatch):
    """Standard input does not depend on the working directory."""
    (tmp_path / "elsewhere").mkdir()
    for folder, rule in ((tmp_path, Meddling(stop)), (tmp_path / "elsewhere", RULE)):
        monkeypatch.chdir(folder)
        with source.open("rb") as file, suppress(KeyboardInterrupt):
            monkeypatch.setattr(sys, "stdin", file)
            prepare([Path("-")], tmp_path / "data", split_rule=rule, options=options())
        assert (tmp_path / "data").exists() == (rule is RULE)


@pytest.mark.parametrize("is_other", [False, True])
def test_standard_input_that_was_read_to_its_end_is_also_compared(
    source, tmp_path, monkeypatch, contents, is_other
):
    """A file is identified by its size and time, a stream only by its bytes."""
    first = tmp_path / "first.fasta"
    first.write_text("".join(f">F{i}\n{'MKVLAWERT' * 40}\n" for i in range(190)))

    def build(out, rule=RULE):
        with first.open("rb") as file:
            monkeypatch.setattr(sys, "stdin", file)
            prepare([Path("-"), source], tmp_path / out, split_rule=rule, options=options())

    with pytest.raises(KeyboardInterrupt):
        build("data", Meddling(stop))
    if is_other:
        first.write_text(first.read_text().replace(">F7\n", ">G7\n"))
        with pytest.raises(
            InputDataError, match=r"standard input.*differs from what was read before"
        ):
            build("data")
        return
    build("data")
    build("whole")
    assert contents(tmp_path / "data") == contents(tmp_path / "whole")
