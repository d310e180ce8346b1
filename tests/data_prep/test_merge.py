"""Clusters reach the index, by processes and by jobs; and parts are merged in order."""

import json
import os
import pickle
import shutil
from functools import partial
from itertools import chain
from unittest import mock

import numpy as np
import pytest

from protlm.data.records.record import accession
from protlm.data.shards.data_set import open_clusters, open_split, verify
from protlm.data.shards.manifest import read_manifest
from protlm.data_prep import prepare as module
from protlm.data_prep.clusters import ClusterSplit, ClusterTable, name_hash
from protlm.data_prep.encode import UNLISTED
from protlm.data_prep.merge import merge
from protlm.data_prep.split import HashSplit, TableSplit
from protlm.options.jobs import Executor, Submission
from protlm.system.errors import InputDataError, OutputError, UserError

RULE = HashSplit(0.2, 0.1)
PART_RULE = HashSplit(0.3, 0.2)


@pytest.fixture
def release(tmp_path):
    """Two files of proteins, some with names as UniProt writes them, some sequences twice."""
    folder = tmp_path / "release"
    folder.mkdir()
    for name, count in (("one", 150), ("two", 80)):
        proteins = [
            f">{f'sp|{name.upper()}{i}|X_Y' if i % 3 else f'{name}{i}'}\nMKV{'LAW' * (i % 60)}\n"
            for i in range(count)
        ]
        (folder / f"{name}.fasta").write_text("".join(proteins))
    return folder


@pytest.fixture
def table(release, tmp_path):
    """Clusters of up to five, of both files; every tenth record is not listed."""
    names = []
    for path in sorted(release.iterdir()):
        words = [line[1:].split()[0] for line in path.read_text().split("\n") if line[:1] == ">"]
        names += [accession(word.split("|")[1] if "|" in word else word) for word in words]
    rows = [(names[i % 46], name) for i, name in enumerate(names) if i % 10 != 7]
    path = tmp_path / "cluster.tsv"
    path.write_text("".join(f"{one}\t{other}\n" for one, other in rows))
    return path


def cluster_of(table):
    rows = [line.split("\t") for line in table.read_text().splitlines()]
    return {member: representative for representative, member in rows}


def assert_indexed(directory, table):
    """Each cluster of each split has those sequences that the table says, and no other."""
    representative_of = cluster_of(table)
    assert verify(directory) == []
    manifest = read_manifest(directory)
    for split in manifest.splits:
        reader, index = open_split(directory, split), open_clusters(directory, split)
        expected: dict[int, list[int]] = {}
        for number in range(len(reader)):
            name = reader.identifier(number)
            expected.setdefault(name_hash(representative_of.get(name, name)), []).append(number)
        assert len(index) == len(expected)
        assert manifest.clusters.indexes[split].clusters == len(expected)
        for cluster, hashed in enumerate(sorted(expected)):
            members = expected[hashed]
            some = np.full(len(members), cluster)
            found = index.members(some, np.arange(len(members), dtype=np.uint64), 0)
            assert found.tolist() == members
    return manifest


@pytest.fixture
def made(release, build):
    """Prepares the files of the release, or one of them."""

    def run(out, table=None, rule=RULE, source=release, **options):
        clusters = None if table is None else ClusterTable(table)
        sources = [source] if source.is_file() else sorted(source.iterdir())
        return build(sources, out, rule, clusters, **options)

    return run


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("deduplicate", [False, True])
def test_the_index_agrees_with_the_table(made, table, tmp_path, deduplicate):
    options = {"deduplicate": deduplicate, "shard_residues": 2_000, "workers": 1 + deduplicate}
    report = made(tmp_path / "data", table, **options)
    manifest = assert_indexed(tmp_path / "data", table)
    assert len(manifest.splits["train"]) > 1
    assert report.clusters == {s: i.clusters for s, i in manifest.clusters.indexes.items()}
    assert json.loads((tmp_path / "data/report.json").read_text())["clusters"] == report.clusters
    assert manifest.clusters.table == "cluster.tsv"
    # Counted of all records, those that are left out as duplicates among them.
    assert report.counts.noted[UNLISTED] == 23


def test_a_table_changes_no_split_and_without_one_no_clusters_are_stored(
    made, table, tmp_path, in_shards
):
    assert made(tmp_path / "data").clusters == {}
    for name in ("manifest.json", "report.json"):
        assert "clusters" not in json.loads((tmp_path / "data" / name).read_text())
    made(tmp_path / "with", table)
    assert in_shards(tmp_path / "with") == in_shards(tmp_path / "data")


@pytest.mark.parametrize(
    ("rule_of", "unlisted"),
    [
        (lambda table, splits: TableSplit(splits), 0),
        (lambda table, splits: ClusterSplit(ClusterTable(table), HashSplit(0.3, 0.2)), 23),
    ],
    ids=["table", "clusters"],
)
def test_clusters_go_with_every_split_rule(made, table, tmp_path, rule_of, unlisted):
    rows = "".join(f"{name}\t{'valid' if '3' in name else 'train'}\n" for name in cluster_of(table))
    (tmp_path / "splits.tsv").write_text(f"accession\tsplit\n{rows}")
    report = made(tmp_path / "data", table, rule_of(table, tmp_path / "splits.tsv"))
    manifest = assert_indexed(tmp_path / "data", table)
    assert report.counts.noted.get(UNLISTED, 0) == unlisted
    if unlisted:
        # No cluster is in two splits, so there are as many as there are names. Of the records that
        # are not listed 4 are representatives, and so in their clusters.
        total = sum(index.clusters for index in manifest.clusters.indexes.values())
        assert total == len(set(cluster_of(table).values())) + unlisted - 4
    else:
        assert set(report.splits) == {"train", "valid"}


# --- merged


@pytest.fixture
def merged(release, made, tmp_path, contents):
    """Returns the files of the release, each prepared in this process, and merged."""

    def run(table=None, **options):
        for name in ("one", "two"):
            made(tmp_path / name, table, source=release / f"{name}.fasta", **options)
        merge([tmp_path / "one", tmp_path / "two"], tmp_path / "merged")
        return contents(tmp_path / "merged")

    return run


@pytest.mark.usefixtures("small_blocks")
def test_parts_with_the_same_table_keep_their_clusters(
    made, merged, table, tmp_path, contents, capsys
):
    found = merged(table, shard_residues=2_000)
    manifest = assert_indexed(tmp_path / "merged", table)
    assert "warning" not in capsys.readouterr().err
    made(tmp_path / "whole", table, shard_residues=2_000)
    whole = contents(tmp_path / "whole")
    for split in manifest.splits:
        assert whole[f"{split}/clusters.h5"] == found[f"{split}/clusters.h5"]


def test_parts_with_different_tables_lose_their_clusters(release, made, table, tmp_path, capsys):
    (tmp_path / "other.tsv").write_text("A\tA\n")
    made(tmp_path / "one", table, source=release / "one.fasta")
    made(tmp_path / "two", None, source=release / "two.fasta")
    made(tmp_path / "three", tmp_path / "other.tsv", source=release / "two.fasta")
    for other, words in (("two", "no clusters"), ("three", "of other.tsv")):
        out = tmp_path / f"merged-{other}"
        merge([tmp_path / "one", tmp_path / other], out)
        said = capsys.readouterr().err
        assert f"{tmp_path / 'one'} has clusters of cluster.tsv" in said
        assert f"{tmp_path / other} has" in said
        assert words in said
        assert verify(out) == []
        with pytest.raises(UserError, match=rf"{out} was prepared without clusters"):
            open_clusters(out, "train")


@pytest.fixture
def parts(tmp_path, fasta, build):
    """Two data sets of several shards, one with a split that the other lacks."""
    proteins = [f">p{i}\nMKV{'LAW' * (i % 50)}{'KR' * i}\n" for i in range(200)]
    fasta("".join(proteins) + ">bad\nMK-V\n", "one.fasta")
    fasta(">q\nMKV\n>worse\nM1\n>x\nMW-\n", "other.fasta")
    for name in ("one", "other"):
        source = tmp_path / f"{name}.fasta"
        build(source, tmp_path / name, PART_RULE, shard_residues=9_000, max_reject_rate=0.7)
    return [tmp_path / "one", tmp_path / "other"]


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


def test_merging_in_steps_or_twice(parts, tmp_path, contents, capsys):
    merge(parts, tmp_path / "once")
    merge([tmp_path / "once"], tmp_path / "again")
    assert contents(tmp_path / "once") == contents(tmp_path / "again")
    assert "warning" not in capsys.readouterr().err
    shutil.copytree(parts[0], tmp_path / "copy")
    merge([*parts, tmp_path / "copy"], tmp_path / "twice")
    told = f"warning: {tmp_path / 'copy'} and {parts[0]} were both made from one.fasta"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("can_link", [True, False])
def test_shards_are_linked_where_that_is_possible(parts, tmp_path, fail_at, can_link):
    if not can_link:
        fail_at(os, "link", OSError("other disk"))
    merge(parts, tmp_path / "data")
    shard = "train/shard-00000.h5"
    assert (tmp_path / "data" / shard).samefile(parts[0] / shard) == can_link
    assert verify(tmp_path / "data") == []


def test_incompatible_parts_are_rejected(parts, tmp_path, build):
    out = tmp_path / "data"
    build(tmp_path / "one.fasta", tmp_path / "rule", HashSplit(0.1, 0.1))
    (tmp_path / "link").symlink_to(parts[0])
    for wrong, kind, told in (
        (
            [parts[0], tmp_path / "rule"],
            UserError,
            r"by different rules \(test_fraction: 0\.1, not",
        ),
        ([parts[0], parts[0]], UserError, "each once"),
        ([parts[0], tmp_path / "link"], UserError, "each once"),
        ([], UserError, "each once"),
        ([parts[0], tmp_path], InputDataError, "protlm prepare"),
    ):
        with pytest.raises(kind, match=told):
            merge(wrong, out)
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


def test_everything_is_synced_before_the_rename(parts, tmp_path, look_at, build):
    """Including its folders: in a power failure a file would be lost with its name."""
    synced = set()
    look_at(os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino))

    def all_synced(folder):
        return all(path.stat().st_ino in synced for path in [folder, *folder.rglob("*")])

    merge(parts, tmp_path / "merged")
    assert all_synced(tmp_path / "merged")
    assert tmp_path.stat().st_ino in synced
    synced.clear()
    build(tmp_path / "one.fasta", tmp_path / "prepared", PART_RULE)
    assert all_synced(tmp_path / "prepared")
    assert tmp_path.stat().st_ino in synced


@pytest.fixture
def prepare_by_jobs(made, tmp_path):
    """Prepares the release by jobs, perhaps with a table of clusters."""
    return partial(made, tmp_path / "data", submission=Submission(Executor.slurm))


@pytest.fixture
def in_this_process(monkeypatch):
    """Runs jobs one after the other in this process, as they come to another machine."""

    def run(self, function, items, folder, cores):
        for item in items:
            pickle.loads(pickle.dumps(function))(item)

    monkeypatch.setattr(Submission, "run", run)
    monkeypatch.setattr(Submission, "check", lambda self: None)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("has_clusters", [False, True])
def test_jobs_make_the_parts_that_are_merged(
    prepare_by_jobs, merged, table, tmp_path, contents, capfd, has_clusters
):
    clusters = table if has_clusters else None
    prepare_by_jobs(clusters)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.tsv", "data", "release"]
    # The report is that of all parts.
    told = [line.split() for line in capfd.readouterr().err.splitlines()]
    assert [words[1] for words in told if words[:1] == ["read"]] == ["230"]
    assert (["clusters", "of", "train"] in [words[:3] for words in told]) == has_clusters
    assert contents(tmp_path / "data") == merged(clusters)


@pytest.mark.usefixtures("in_this_process")
def test_failed_jobs_are_resumed(release, tmp_path, protlm_in_process, contents, merged):
    arguments = ["prepare", "release", "--out", "data", "--executor", "slurm"]
    arguments += ["--valid-fraction", "0.2", "--test-fraction", "0.1"]
    with (release / "two.fasta").open("a") as file:
        file.write(">bad\nMK1\n>worse\nM2\n")
    # The user's file is at fault, and says in its job why it cannot be used.
    done = protlm_in_process(*arguments, cwd=tmp_path, code=3)
    assert "2 of 82 records" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "data.partial" / "parts").is_dir()
    protlm_in_process(*arguments, "--max-reject-rate", "0.1", cwd=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "release"]
    assert contents(tmp_path / "data") == merged(max_reject_rate=0.1)


@pytest.mark.usefixtures("in_this_process")
def test_an_error_while_merging_keeps_the_parts(prepare_by_jobs, tmp_path, monkeypatch, contents):
    """They may have taken a cluster days."""

    def fill_the_disk(directory, parts):
        (directory / "train").mkdir()
        (directory / "train" / "shard-00000.h5").write_text("half a shard")
        raise OSError(28, "No space left on device")

    with (
        mock.patch.object(module, "merge_into", fill_the_disk),
        pytest.raises(OutputError, match="no space left"),
    ):
        prepare_by_jobs()
    parts = tmp_path / "data.partial" / "parts"
    assert {name.split("/")[0] for name in contents(parts)} == {"00000", "00001"}
    monkeypatch.setattr(module, "_build", None)
    shard = parts / "00001" / "train" / "shard-00000.h5"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + b"?")
    # It was hashed when it was written, perhaps days ago.
    with pytest.raises(InputDataError, match=f"{shard}.*: start over"):
        prepare_by_jobs()
    shard.write_bytes(content)
    prepare_by_jobs()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "release"]


def test_options_that_need_all_sources_are_rejected(prepare_by_jobs):
    with pytest.raises(UserError, match=r"--executor.*--deduplicate"):
        prepare_by_jobs(deduplicate=True)


@pytest.mark.usefixtures("in_this_process")
def test_a_family_may_be_in_one_of_several_files(tmp_path, protlm_in_process):
    """Each job sees one file, so this can be checked only for the merged data set."""
    (tmp_path / "one.fasta").write_text(">P00001\nMKTAYIAKQRQISFV\n>P00002\nMKTAYIAKQ\n")
    (tmp_path / "two.fasta").write_text(">P00003\nMKTAYIAWWWQISFV\n")
    (tmp_path / "families.tsv").write_text("P00001\tPF00001\nP00009\tPF00002\n")
    arguments = ["prepare", "one.fasta", "two.fasta", "--executor", "slurm"]
    families = ["--family-table", "families.tsv", "--ood-families"]
    protlm_in_process(*arguments, "--out", "D", *families, "PF00001", cwd=tmp_path)
    assert len(open_split(tmp_path / "D", "test_ood_family")) == 1
    # Errors of the merged set are reported again.
    for _ in range(2):
        typed = [*arguments, "--out", "E", *families, "PF00002"]
        done = protlm_in_process(*typed, cwd=tmp_path, code=3)
        assert "no record belongs to a held-out family" in done.stderr
        assert not (tmp_path / "E").exists()
