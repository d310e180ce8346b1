"""One job per file: the same sequences as in one process, and resumable."""

import pytest

from protlm.data.shards.data_set import open_split
from protlm.data.shards.manifest import read_manifest
from protlm.data_prep import merge as module
from protlm.data_prep.merge import merge, prepare_by_jobs
from protlm.data_prep.prepare import PrepareOptions, prepare
from protlm.data_prep.split import HashSplit
from protlm.system.errors import InputDataError, OutputError, UserError
from protlm.system.shares import Executor, Submission

RULE = HashSplit(0.2, 0.1)


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
        prepare([release / f"{name}.fasta"], parts[-1], split_rule=RULE, options=options)
    merge(parts, tmp_path / "merged")
    return contents(tmp_path / "merged")


def prepare_locally(release, tmp_path, **options):
    prepare_by_jobs(
        sorted(release.iterdir()),
        tmp_path / "data",
        split_rule=RULE,
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
    monkeypatch.setattr(module, "prepare", None)
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
