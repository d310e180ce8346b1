"""Clusters of a table reach the index: by one process, by several, by jobs, and merged."""

import json
import pickle

import numpy as np
import pytest

from protlm.data.shards.data_set import open_clusters, open_split, verify
from protlm.data.shards.manifest import read_manifest
from protlm.data_prep.clusters import ClusterSplit, ClusterTable, member_name, name_hash
from protlm.data_prep.encode import UNLISTED
from protlm.data_prep.merge import merge
from protlm.data_prep.prepare import PrepareOptions, prepare
from protlm.data_prep.split import HashSplit, TableSplit
from protlm.system.errors import InputDataError, UserError
from protlm.system.shares import Executor, Submission

RULE = HashSplit(0.2, 0.1)


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
        names += [member_name(word.split("|")[1] if "|" in word else word) for word in words]
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

    def run(out, table, rule=RULE, source=release, **options):
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


def test_without_a_table_no_clusters_are_stored_and_the_splits_are_the_same(
    made, table, tmp_path, in_shards
):
    report = made(tmp_path / "data", None)
    assert report.clusters == {}
    for name in ("manifest.json", "report.json"):
        assert "clusters" not in json.loads((tmp_path / "data" / name).read_text())
    assert not list((tmp_path / "data").rglob("clusters.h5"))
    made(tmp_path / "with", table)
    assert in_shards(tmp_path / "with") == in_shards(tmp_path / "data")


def test_clusters_go_with_every_split_rule(made, table, tmp_path):
    rows = "".join(f"{name}\t{'valid' if '3' in name else 'train'}\n" for name in cluster_of(table))
    (tmp_path / "splits.tsv").write_text(f"accession\tsplit\n{rows}")
    report = made(tmp_path / "table", table, TableSplit(tmp_path / "splits.tsv"))
    assert_indexed(tmp_path / "table", table)
    assert set(report.splits) == {"train", "valid"}
    assert UNLISTED not in report.counts.noted
    rule = ClusterSplit(ClusterTable(table), HashSplit(0.3, 0.2))
    made(tmp_path / "cluster", table, rule)
    manifest = assert_indexed(tmp_path / "cluster", table)
    # No cluster is in two splits, so there are as many as there are names. Of the 23 records that
    # are not listed 4 are representatives, and so in their clusters.
    total = sum(index.clusters for index in manifest.clusters.indexes.values())
    assert total == len(set(cluster_of(table).values())) + 23 - 4


def test_the_command_line_stores_clusters(release, table, tmp_path, protlm_in_process):
    rows = "".join(f"{name}\ttrain\n" for name in cluster_of(table))
    (tmp_path / "splits.tsv").write_text(f"accession\tsplit\n{rows}")
    arguments = ["prepare", "release", "--out", "data", "--cluster-table", "cluster.tsv"]
    done = protlm_in_process(*arguments, "--split-table", "splits.tsv", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    index = assert_indexed(tmp_path / "data", table).clusters.indexes["train"]
    assert f"clusters of train {index.clusters}" in " ".join(done.stderr.split())
    done = protlm_in_process("data", "verify", "data", cwd=tmp_path)
    assert f"sequences of {index.clusters} clusters" in done.stdout
    done = protlm_in_process("data", "info", "data", cwd=tmp_path)
    assert "clusters of cluster.tsv" in done.stdout
    assert f" {index.clusters} " in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "cluster.tsv", "data", "release", "splits.tsv"
    ]  # fmt: skip


@pytest.mark.usefixtures("small_blocks")
def test_a_build_does_not_resume_with_another_table(made, table, tmp_path, monkeypatch):
    out, options = tmp_path / "data", {"shard_residues": 2_000}

    def fail(*_):
        raise InputDataError("stopped")

    with monkeypatch.context() as patch, pytest.raises(InputDataError, match="stopped"):
        patch.setattr("protlm.data_prep.prepare.write_clusters", fail)
        made(out, table, **options)
    assert (tmp_path / "data.partial").is_dir()
    for other in (None, tmp_path / "other.tsv"):
        (tmp_path / "other.tsv").write_text("A\tA\n")
        with pytest.raises(UserError, match=r"was begun with cluster table.*--restart"):
            made(out, other, **options)
    made(out, table, **options)
    assert_indexed(out, table)


# --- merged


@pytest.mark.usefixtures("small_blocks")
def test_parts_with_the_same_table_keep_their_clusters(
    release, made, table, tmp_path, contents, capsys
):
    for name in ("one", "two"):
        made(tmp_path / name, table, source=release / f"{name}.fasta", shard_residues=2_000)
    report = merge([tmp_path / "one", tmp_path / "two"], tmp_path / "merged")
    manifest = assert_indexed(tmp_path / "merged", table)
    assert report.clusters["train"] == manifest.clusters.indexes["train"].clusters
    made(tmp_path / "whole", table, shard_residues=2_000)
    whole, merged = contents(tmp_path / "whole"), contents(tmp_path / "merged")
    for split in manifest.splits:
        assert whole[f"{split}/clusters.h5"] == merged[f"{split}/clusters.h5"]
    assert "warning" not in capsys.readouterr().err


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


@pytest.mark.parametrize("where", ["this process", pytest.param("others", marks=pytest.mark.slow)])
def test_jobs_read_the_table(release, made, table, tmp_path, contents, monkeypatch, where):
    def run(self, function, items, folder, cores):
        # As they come to another machine.
        for item in items:
            sent(function)(item)

    def sent(function):
        return pickle.loads(pickle.dumps(function))

    if where == "this process":
        monkeypatch.setattr(Submission, "run", run)
    prepare(
        sorted(release.iterdir()),
        tmp_path / "data",
        split_rule=RULE,
        clusters=ClusterTable(table),
        options=PrepareOptions(),
        submission=Submission(Executor.LOCAL),
    )
    assert_indexed(tmp_path / "data", table)
    for name in ("one", "two"):
        made(tmp_path / name, table, source=release / f"{name}.fasta")
    merge([tmp_path / "one", tmp_path / "two"], tmp_path / "merged")
    assert contents(tmp_path / "data") == contents(tmp_path / "merged")
    assert not (tmp_path / "data.partial").exists()
