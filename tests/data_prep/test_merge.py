"""Merging in order, without copies or losses; and one job per file, whose parts are merged."""

import json
import os
import shutil
from itertools import chain

import pytest

from protlm.data.shards.data_set import open_split, verify
from protlm.data.shards.manifest import read_manifest
from protlm.data_prep import merge as merging
from protlm.data_prep import prepare as module
from protlm.data_prep.merge import merge
from protlm.data_prep.prepare import PrepareOptions, prepare
from protlm.data_prep.split import HashSplit
from protlm.system.errors import InputDataError, OutputError, UserError
from protlm.system.shares import Executor, Submission

RULE = HashSplit(0.3, 0.2)
JOB_RULE = HashSplit(0.2, 0.1)


@pytest.fixture
def parts(tmp_path, fasta, build):
    """Two data sets of several shards, one with a split that the other lacks."""
    proteins = [f">p{i}\nMKV{'LAW' * (i % 50)}{'KR' * i}\n" for i in range(200)]
    fasta("".join(proteins) + ">bad\nMK-V\n", "one.fasta")
    fasta(">q\nMKV\n>worse\nM1\n>x\nMW-\n", "other.fasta")
    for name in ("one", "other"):
        source = tmp_path / f"{name}.fasta"
        build(source, tmp_path / name, RULE, shard_residues=9_000, max_reject_rate=0.7)
    return [tmp_path / "one", tmp_path / "other"]


def test_parts_of_one_source_are_reported(parts, tmp_path, capsys):
    merge(parts, tmp_path / "data")
    assert "warning" not in capsys.readouterr().err
    shutil.copytree(parts[0], tmp_path / "copy")
    merge([*parts, tmp_path / "copy"], tmp_path / "twice")
    told = f"warning: {tmp_path / 'copy'} and {parts[0]} were both made from one.fasta"
    assert told in capsys.readouterr().err


@pytest.mark.usefixtures("small_blocks")
def test_the_parts_are_joined_in_the_order_given(parts, tmp_path, in_shards):
    out = tmp_path / "new" / "data"
    report = merge(parts[::-1], out)
    assert verify(out) == []
    merged, found = read_manifest(out), [in_shards(part) for part in parts[::-1]]
    assert in_shards(out) == {
        split: list(chain.from_iterable(one.get(split, []) for one in found))
        for split in ("train", "valid", "test")
    }
    for shards in merged.splits.values():
        assert [int(shard.file[-8:-3]) for shard in shards] == list(range(len(shards)))
    assert sum(len(shards) for shards in merged.splits.values()) > 4
    assert [source.file for source in merged.sources] == ["other.fasta", "one.fasta"]
    assert report.counts.records == 204
    assert report.counts.rejected == {"gap": 2, "digit": 1}
    assert json.loads((out / "report.json").read_text())["counts"]["records"] == 204
    assert (out / "rejected.tsv").read_text().splitlines()[1:] == [
        "digit\tworse\tother.fasta\t3",
        "gap\tx\tother.fasta\t5",
        "gap\tbad\tone.fasta\t401",
    ]


@pytest.mark.parametrize("can_link", [True, False])
def test_shards_are_linked_where_that_is_possible(parts, tmp_path, monkeypatch, can_link):
    if not can_link:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("other disk")))
    merge(parts, tmp_path / "data")
    shard = "train/shard-00000.h5"
    assert (tmp_path / "data" / shard).samefile(parts[0] / shard) == can_link
    assert verify(tmp_path / "data") == []


def test_the_order_of_merging_in_steps_does_not_matter(parts, tmp_path, contents):
    merge(parts, tmp_path / "once")
    merge([tmp_path / "once"], tmp_path / "twice")
    assert contents(tmp_path / "once") == contents(tmp_path / "twice")


def test_incompatible_parts_are_rejected(parts, tmp_path, build):
    out = tmp_path / "data"
    build(tmp_path / "one.fasta", tmp_path / "rule", HashSplit(0.1, 0.1))
    with pytest.raises(
        UserError, match=r"were split by different rules \(test_fraction: 0\.1, not 0\.2\)"
    ):
        merge([parts[0], tmp_path / "rule"], out)
    (tmp_path / "link").symlink_to(parts[0])
    for wrong in ([parts[0], parts[0]], [parts[0], tmp_path / "link"], []):
        with pytest.raises(UserError, match="each once"):
            merge(wrong, out)
    with pytest.raises(InputDataError, match="protlm prepare"):
        merge([parts[0], tmp_path], out)
    with pytest.raises(OutputError, match="exists"):
        merge([parts[0]], parts[1])
    assert not out.exists()


@pytest.mark.parametrize("how", ["truncated", "flipped"])
@pytest.mark.parametrize("file", ["train/shard-00000.h5", "rejected.tsv", "manifest.json"])
def test_a_damaged_part_is_rejected(parts, tmp_path, file, how):
    path = parts[0] / file
    content = bytearray(path.read_bytes())
    content[-2] ^= 16
    path.write_bytes(content[:-20] + b"x" if how == "truncated" else content)
    with pytest.raises(InputDataError, match=f"{path}"):
        merge(parts, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_lists_stay_bounded(parts, tmp_path, monkeypatch):
    monkeypatch.setattr(merging, "MAX_LISTED", 1)
    merge(parts, tmp_path / "data")
    rows = (tmp_path / "data" / "rejected.tsv").read_text().splitlines()
    assert [row.split("\t")[0] for row in rows[1:]] == ["digit", "gap"]


def test_everything_is_synced_before_the_rename(parts, tmp_path, monkeypatch, build):
    """Including its folders: in a power failure a file would be lost with its name."""
    synced, sync = set(), os.fsync

    def noted_sync(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def all_synced(folder):
        return all(path.stat().st_ino in synced for path in [folder, *folder.rglob("*")])

    monkeypatch.setattr(os, "fsync", noted_sync)
    merge(parts, tmp_path / "merged")
    assert all_synced(tmp_path / "merged")
    assert tmp_path.stat().st_ino in synced
    synced.clear()
    build(tmp_path / "one.fasta", tmp_path / "prepared", RULE)
    assert all_synced(tmp_path / "prepared")
    assert tmp_path.stat().st_ino in synced


@pytest.fixture
def release(tmp_path):
    """Two files of proteins in a folder."""
    folder = tmp_path / "release"
    folder.mkdir()
    for name, count in (("one", 150), ("two", 50)):
        proteins = [f">{name}{i}\nMKV{'LAW' * (i % 40)}\n" for i in range(count)]
        (folder / f"{name}.fasta").write_text("".join(proteins))
    return folder


def merged(release, tmp_path, contents):
    """The files of the release, each prepared in this process, and merged."""
    parts = []
    for name in ("one", "two"):
        parts.append(tmp_path / name)
        options = PrepareOptions(max_reject_rate=0.1)
        prepare([release / f"{name}.fasta"], parts[-1], split_rule=JOB_RULE, options=options)
    merge(parts, tmp_path / "merged")
    return contents(tmp_path / "merged")


def prepare_locally(release, tmp_path, **options):
    prepare(
        sorted(release.iterdir()),
        tmp_path / "data",
        split_rule=JOB_RULE,
        options=PrepareOptions(**options),
        submission=Submission(Executor.LOCAL),
    )


def test_jobs_make_the_parts_that_are_merged(release, tmp_path, contents, capfd):
    prepare_locally(release, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "release"]
    # The report is that of all parts.
    assert [line.split()[:2] for line in capfd.readouterr().err.splitlines() if "read" in line] == [
        ["read", "200"]
    ]
    assert contents(tmp_path / "data") == merged(release, tmp_path, contents)


@pytest.mark.slow
def test_failed_jobs_are_resumed(release, tmp_path, protlm_command, contents):
    arguments = ["prepare", "release", "--out", "data", "--valid-fraction", "0.2"]
    arguments += ["--test-fraction", "0.1", "--executor", "local"]
    with (release / "two.fasta").open("a") as file:
        file.write(">bad\nMK1\n>worse\nM2\n")
    done = protlm_command(*arguments, cwd=tmp_path)
    # The user's file is at fault, and says in its job why it cannot be used.
    assert done.returncode == 3, done.stderr
    assert "2 of 52 records" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "data.partial" / "parts").is_dir()
    done = protlm_command(*arguments, "--max-reject-rate", "0.1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "release"]
    assert contents(tmp_path / "data") == merged(release, tmp_path, contents)


@pytest.fixture
def in_this_process(monkeypatch):
    """Runs jobs one after the other in this process."""

    def run(self, function, items, folder, cores):
        for item in items:
            function(item)

    monkeypatch.setattr(Submission, "run", run)


@pytest.mark.usefixtures("in_this_process")
def test_an_error_while_merging_keeps_the_parts(release, tmp_path, monkeypatch, contents):
    """They may have taken a cluster days."""

    def fill_the_disk(directory, parts):
        (directory / "train").mkdir()
        (directory / "train" / "shard-00000.h5").write_text("half a shard")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "merge_into", fill_the_disk)
        with pytest.raises(OutputError, match="no space left"):
            prepare_locally(release, tmp_path)
    parts = tmp_path / "data.partial" / "parts"
    assert {name.split("/")[0] for name in contents(parts)} == {"00000", "00001"}
    monkeypatch.setattr(module, "_build", None)
    prepare_locally(release, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "release"]
    assert sum(entry.sequences for entry in read_manifest(tmp_path / "data").splits["train"]) > 100


@pytest.mark.usefixtures("in_this_process")
def test_errors_of_the_merged_set_are_reported_again(release, tmp_path, monkeypatch):
    def refuse(rule, noted):
        raise InputDataError("an empty hold-out")

    monkeypatch.setattr(module, "refuse_empty_hold_out", refuse)
    for _ in range(2):
        with pytest.raises(InputDataError, match="an empty hold-out"):
            prepare_locally(release, tmp_path)
    assert not (tmp_path / "data").exists()


def test_options_that_need_all_sources_are_rejected(release, tmp_path):
    with pytest.raises(UserError, match=r"--executor.*--deduplicate"):
        prepare_locally(release, tmp_path, deduplicate=True)


@pytest.mark.usefixtures("in_this_process")
def test_a_family_may_be_in_one_of_several_files(tmp_path, protlm_in_process):
    """Each job sees one file, so this can be checked only for the merged data set."""
    (tmp_path / "one.fasta").write_text(">P00001\nMKTAYIAKQRQISFV\n>P00002\nMKTAYIAKQ\n")
    (tmp_path / "two.fasta").write_text(">P00003\nMKTAYIAWWWQISFV\n")
    (tmp_path / "families.tsv").write_text("P00001\tPF00001\nP00009\tPF00002\n")
    arguments = ["prepare", "one.fasta", "two.fasta", "--executor", "local"]
    families = ["--family-table", "families.tsv", "--ood-families"]
    done = protlm_in_process(*arguments, "--out", "D", *families, "PF00001", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(open_split(tmp_path / "D", "test_ood_family")) == 1
    done = protlm_in_process(*arguments, "--out", "E", *families, "PF00002", cwd=tmp_path)
    assert done.returncode == 3
    assert "no record belongs to a held-out family" in done.stderr
    assert not (tmp_path / "E").exists()
