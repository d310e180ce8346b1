"""`protlm data verify`, `info` and `export`."""

import errno
import gzip
import re
import sys
import time
from pathlib import Path

import pytest

from protlm import __version__
from protlm.commands import data as data_sets
from protlm.commands.data import export, info, verify
from protlm.data.records import Tally, read_records
from protlm.data_prep.prepare import prepare
from protlm.data_prep.split import HashSplit, TableSplit
from protlm.system.errors import InputDataError, OutputError, UserError


@pytest.fixture
def directory(tmp_path, tiny_fasta):
    out = tmp_path / "data"
    prepare([tiny_fasta], out, split_rule=HashSplit(0.1, 0.1))
    return out


def pairs(path):
    return sorted((r.identifier, r.sequence) for r in read_records(path, Tally()))


def test_verify_prints_a_line_for_each_split(directory, capsys):
    verify(directory)
    lines = capsys.readouterr().out.splitlines()
    assert [x.split(":")[::2] for x in lines] == [[n, " ok"] for n in ("test", "train", "valid")]
    counts = [int(re.search(r"([\d,]+) sequences", line)[1].replace(",", "")) for line in lines]
    assert sum(counts) == 180


def test_damaged_and_missing_files_are_listed_and_not_exported(directory, tmp_path):
    shard = directory / "train" / "shard-00000.h5"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    (directory / "extra").touch()
    with pytest.raises(InputDataError, match=r"shard-00000\.h5.*extra is not in the manifest"):
        verify(directory)
    shard.write_bytes(content[:-1])
    with pytest.raises(InputDataError, match="train"):
        export(directory, tmp_path / "back.fasta", ())
    assert not (tmp_path / "back.fasta").exists()


def test_info_describes_splits_sources_and_counts(directory, tiny_fasta, capsys):
    info(directory)
    text = capsys.readouterr().out
    for word in ("train", "valid", "median", tiny_fasta.name, "180", "blake2b-128 of the sequence"):
        assert word in text


def test_info_truncates_nothing_without_a_terminal(tmp_path, monkeypatch, capsys):
    """rich assumes 80 columns for a file or a pipe."""
    monkeypatch.delenv("COLUMNS", raising=False)
    source, split = tmp_path / f"{'proteins_of_' * 12}mine.fasta", "s" * 64
    source.write_text(">P1\nMKV\n")
    table = tmp_path / "table.tsv"
    table.write_text(f"accession\tsplit\nP1\t{split}\n")
    prepare([source], tmp_path / "data", split_rule=TableSplit(table))
    info(tmp_path / "data")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert (rows[0][3:5], rows[1]) == (["shards", "shortest"], [split, "1", "3", "1", *["3"] * 5])
    assert [source.name, "8"] in [row[:2] for row in rows]
    assert any(row[:3] == ["split", "by", "table,"] and row[-1] == __version__ for row in rows)


@pytest.mark.parametrize("output", ["back.fasta", None, "-"])
def test_export_writes_every_sequence(directory, tiny_fasta, tmp_path, monkeypatch, capsys, output):
    monkeypatch.chdir(tmp_path)
    path = Path("back.fasta")
    export(directory, output and Path(output), ())
    if output != "back.fasta":
        assert [entry.name for entry in tmp_path.iterdir()] == ["data"]
        path.write_text(capsys.readouterr().out)
    assert pairs(path) == pairs(tiny_fasta)
    assert max(len(line) for line in path.read_text().splitlines()) == 60


def test_gzip_output_is_reproducible(directory, tmp_path, monkeypatch):
    export(directory, tmp_path / "plain.fasta", ())
    for name, now in (("one.fasta.gz", 1e9), ("two.fasta.gz", 2e9)):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        export(directory, tmp_path / name, ())
    one, two = ((tmp_path / name).read_bytes() for name in ("one.fasta.gz", "two.fasta.gz"))
    assert one == two
    assert gzip.decompress(one) == (tmp_path / "plain.fasta").read_bytes()


def test_export_of_one_split(directory, tiny_fasta, tmp_path):
    parts = []
    for split in ("train", "valid", "test"):
        export(directory, tmp_path / split, [split])
        parts += pairs(tmp_path / split)
    assert sorted(parts) == pairs(tiny_fasta)
    export(directory, tmp_path / "two", ["valid", "test", "valid"])
    both = (tmp_path / "valid").read_text() + (tmp_path / "test").read_text()
    assert (tmp_path / "two").read_text() == both
    with pytest.raises(UserError, match="test, train, valid"):
        export(directory, None, ["../train"])


def test_export_to_a_closed_standard_output_is_refused(directory, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(OutputError, match="standard output is closed; give a file"):
        export(directory, None, ())


@pytest.mark.parametrize("name", ["back.fasta", "back.fasta.gz"])
def test_an_interrupted_export_leaves_no_files(directory, tmp_path, fail_at, name):
    fail_at(data_sets, "fasta_text", OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(OutputError, match=f"{name}: no space left"):
        export(directory, tmp_path / name, ())
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]
