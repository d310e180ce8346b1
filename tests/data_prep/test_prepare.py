"""Preparation: sources are found, every record is kept or counted, and output is atomic."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from protlm.data.records import Tally, read_records
from protlm.data.records.fasta import FastaBlock
from protlm.data.shards.data_set import open_split, verify
from protlm.data.shards.manifest import Counts, read_manifest
from protlm.data_prep.report import read_rejected, write_rejected
from protlm.data_prep.sources import find_sources, list_files, refuse_inside
from protlm.data_prep.split import HashSplit, TableSplit
from protlm.options.prepare import Selection
from protlm.system.errors import InputDataError, OutputError, UserError
from protlm.system.paths import sample_dir, sha256_of

TINY = sample_dir() / "uniprot_tiny.fasta.gz"
SAMPLE = sample_dir() / "uniprot_sample.fasta.gz"
TABLE = sample_dir() / "uniprot_sample.splits.tsv.gz"
ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = Path(__file__).parent / "programs" / "prepare_standard_input.py"


def test_every_sequence_of_the_sample_is_in_its_split(build, out, in_shards):
    report = build(SAMPLE, out, TableSplit(TABLE), shard_residues=1)
    with gzip.open(TABLE, "rt") as file:
        split_of = dict(line.split("\t")[:2] for line in file)
    expected: dict[str, list[tuple[str, str]]] = {}
    for record in read_records(SAMPLE, Tally()):
        pair = (record.identifier, record.sequence)
        expected.setdefault(split_of[record.identifier], []).append(pair)
    assert in_shards(out) == expected
    assert verify(out) == []
    assert {split: size.sequences for split, size in report.splits.items()} == {
        "train": 10_240, "valid": 540, "test_iid": 614, "test_remote_homolog": 132,
        "test_ood_cluster": 315, "test_ood_family": 532,
    }  # fmt: skip
    assert report.splits["train"].shards == 2
    assert report.counts.records == 12_373
    assert not report.counts.rejected
    assert not report.counts.filtered


@pytest.mark.usefixtures("small_blocks")
def test_the_same_input_gives_the_same_bytes_by_any_number_of_workers(build, tmp_path, contents):
    sources, rule = [TINY, sample_dir() / "bpt1_bovin.fasta"], HashSplit(0.1, 0.1)
    for workers in (1, 2, 3):
        build(sources, tmp_path / str(workers), rule, workers=workers, shard_residues=5_000)
    one = contents(tmp_path / "1")
    assert len([name for name in one if name.startswith("train/")]) > 5
    assert contents(tmp_path / "2") == one
    assert contents(tmp_path / "3") == one


@pytest.mark.usefixtures("small_blocks")
def test_the_size_of_shards_does_not_change_a_split(build, tmp_path, in_shards):
    sizes = (1, 20_000, 10**9)
    for size in sizes:
        build(TINY, tmp_path / str(size), HashSplit(0.2, 0), shard_residues=size)
    first, *others = (in_shards(tmp_path / str(size)) for size in sizes)
    assert all(other == first for other in others)
    shards = [read_manifest(tmp_path / str(size)).splits["train"] for size in sizes]
    assert len(shards[0]) > len(shards[1]) > len(shards[2]) == 1
    # Segments are cut over all splits together, and splits without a sequence leave no shard.
    assert all(shard.sequences for some in shards for shard in some)
    numbers = [[shard.file[-8:-3] for shard in some] for some in shards]
    assert all(some == [f"{i:05d}" for i in range(len(some))] for some in numbers)


@pytest.mark.usefixtures("small_blocks")
def test_short_sequences_do_not_accumulate_in_memory(build, fasta, out, monkeypatch, in_shards):
    """A shard of peptides has many more names and offsets than a shard of proteins."""
    monkeypatch.setattr("protlm.data_prep.segments._MAX_SEQUENCES", 1_000)
    build(fasta("".join(f">p{number}\nMKVLA\n" for number in range(5_000))), out)
    shards = read_manifest(out).splits["train"]
    assert len(shards) == 5
    # A block of 4 KiB has some 400.
    assert all(shard.sequences < 1_500 for shard in shards)
    assert [name for name, _ in in_shards(out)["train"]] == [f"p{i}" for i in range(5_000)]


@pytest.mark.usefixtures("small_blocks")
def test_every_record_is_in_a_shard_or_counted(build, fasta, out, in_shards):
    rng = np.random.default_rng(0)
    kinds = ["MKVLAW", "MKVLAW" * 9, "mkv*", "", "M1", "MK-V", "MXJ", "MK*V", "W" * 200]
    picked = [kinds[i] + "KR" * rng.integers(0, 9) for i in rng.integers(0, len(kinds), 4_000)]
    source = fasta("".join(f">p{i}\n{letters}\n" for i, letters in enumerate(picked)))
    selection = Selection(min_length=4, max_length=150)
    options = {"max_reject_rate": 1, "deduplicate": True, "shard_residues": 1_000}
    counts = build(source, out, HashSplit(0.2, 0.2), selection=selection, **options).counts
    names = [name for some in in_shards(out).values() for name, _ in some]
    left_out = sum(counts.rejected.values()) + sum(counts.filtered.values())
    assert len(names) + left_out == counts.records == 4_000
    assert len(set(names)) == len(names)
    assert min(len(counts.rejected), len(counts.filtered), len(counts.changed)) >= 3


def test_every_outcome_is_reported(build, fasta, out):
    one = fasta(b">a\nMKVLW\n>b\nmkvlw*\n>bad one\nMK-V\n>\nMJV\n>e\n\n>f\nMKV\x00\n")
    more = "".join(f">p{i}\nMKVLW{'KR' * (i % 7)}\n" for i in range(1_100))
    build([one, fasta(f"{more}>g\nM-\n", "more.fasta")], out)
    report, manifest = json.loads((out / "report.json").read_text()), read_manifest(out)
    assert report["counts"] == {
        "records": 1_107,
        "rejected": {"gap": 2, "blank sequence": 1, "NUL byte": 1},
        "filtered": {},
        "changed": {
            "J written as X": 1,
            "bare '>' named by its line": 1,
            "lower case raised": 1,
            "terminal '*' removed": 1,
        },
        "noted": {},
    }
    assert manifest.counts == Counts(**report["counts"])
    assert report["splits"]["train"]["sequences"] == 1_103
    assert (out / "rejected.tsv").read_text().splitlines() == [
        "reason\tidentifier\tfile\tline",
        "NUL byte\tf\tproteins.fasta\t11",
        "blank sequence\te\tproteins.fasta\t9",
        "gap\tbad\tproteins.fasta\t5",
        "gap\tg\tmore.fasta\t2201",
    ]
    assert [source.file for source in manifest.sources] == ["proteins.fasta", "more.fasta"]
    assert manifest.sources[0].sha256 == sha256_of(one)
    assert str(out.parent) not in (out / "manifest.json").read_text()


def test_too_many_rejects_stop_and_leave_nothing(build, fasta, out, capsys):
    source = fasta(">a\nMKV\n" * 49 + ">bad\nMK-V\n")
    with pytest.raises(InputDataError, match=r"1 of 50.*1 gap.*or allow more$") as told:
        build(source, out)
    assert told.value.options == {"max_reject_rate": 0.02, "allow_gaps": True}
    # Nothing is left that would name it otherwise.
    assert f"bad ({source.name}, line 99: gap)" in str(told.value)
    assert not out.parent.exists() or not list(out.parent.iterdir())
    # Few records are no reason for a warning.
    assert "warning" not in capsys.readouterr().err
    build(source, out, max_reject_rate=0.02)
    assert len(open_split(out, "train")) == 49


@pytest.mark.usefixtures("small_blocks")
def test_too_many_rejects_of_a_large_input_can_be_allowed_without_reading_it_again(
    build, fasta, out, monkeypatch, contents
):
    source = fasta(">a\nMKVLW\n" * 5_000 + ">bad\nMK-V\n" * 500)
    with pytest.raises(InputDataError, match="500 of 5,500"):
        build(source, out, shard_residues=1)
    # Digests are written only on request.
    assert not list(out.with_name("data.partial").rglob("first-*.bin"))
    parsed, records = [], FastaBlock.records
    monkeypatch.setattr(
        FastaBlock, "records", lambda self, tally: parsed.append(self) or records(self, tally)
    )
    build(source, out, shard_residues=1, max_reject_rate=0.2)
    assert 0 < len(parsed) < 4
    build(source, out.with_name("whole"), shard_residues=1, max_reject_rate=0.2)
    assert contents(out) == contents(out.with_name("whole"))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("size", [10_000, 10**9])
def test_a_warning_about_rejects_is_printed_once(build, fasta, out, monkeypatch, capsys, size):
    monkeypatch.setattr("protlm.data_prep.report._ENOUGH_RECORDS", 1_000)
    bad = ">gap\nMK-V\n>gap\nMK-V\n>digit\nMK1V\n" * 10
    early = fasta(">a\nMKVLW\n" * 970 + bad + ">a\nMKVLW\n" * 9_000)
    build(early, out, shard_residues=size)
    told = capsys.readouterr().err
    assert told.count("warning") == 1
    assert "30 of the first 1," in told
    assert "(20) for this reason: gap; if more than 1.00%" in told
    late = fasta(">a\nMKVLW\n" * 9_970 + bad, "late.fasta")
    build(late, out.with_name("late"), shard_residues=size)
    assert "warning" not in capsys.readouterr().err


def test_records_missing_from_the_table_are_filtered(build, fasta, out, table, in_shards):
    source = fasta(">a\nMKV\n>b\nMKL\n")
    report = build(source, out, TableSplit(table("accession\tsplit\na\ttrain\nunused\ttest\n")))
    assert in_shards(out) == {"train": [("a", "MKV")]}
    assert report.counts.filtered == {"in no split": 1}
    others = TableSplit(table("accession\tsplit\nunused\ttest\n"))
    with pytest.raises(InputDataError, match=r"none of the 2 records is left.*2 in no split"):
        build(source, out.with_name("others"), others)
    assert [path.name for path in out.parent.iterdir()] == ["data"]


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
def test_the_first_copy_is_kept_in_any_split(build, fasta, out, table, in_shards):
    """Compared with a Python set, over several sources, blocks, segments and splits."""
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 700, 3_000)
    pairs = [(f"p{i}", "MKV" + "LA" * (n % 50) + "KRDEW"[n % 5] * n) for i, n in enumerate(numbers)]
    splits = [("train", "valid", "test")[i] for i in rng.integers(0, 3, len(pairs))]
    rows = [(name, split) for (name, _), split in zip(pairs, splits, strict=True)]
    expected, seen = {}, set()
    for (name, sequence), split in zip(pairs, splits, strict=True):
        if sequence not in seen:
            seen.add(sequence)
            expected.setdefault(split, []).append((name, sequence))
    records = [f">{name}\n{sequence}\n" for name, sequence in pairs]
    sources = [fasta("".join(records[:900]), "one"), fasta("".join(records[900:]), "two")]
    rule = TableSplit(table([("accession", "split"), *rows]))
    report = build(sources, out, rule, deduplicate=True, shard_residues=30_000, workers=2)
    assert in_shards(out) == expected
    assert report.counts.filtered == {"duplicate sequence": len(pairs) - len(seen)}
    assert not report.counts.noted
    assert len(read_manifest(out).splits["train"]) > 3


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("settings", "left_out"),
    [({"no_fragments": True}, "fragment"), ({"organisms": ("9606",)}, "other organism")],
)
def test_headers_are_parsed_for_the_selection(build, fasta, out, workers, settings, left_out):
    source = fasta(
        ">sp|P1|A Actin (Fragment) OS=Homo sapiens OX=9606\nMKL\n"
        ">sp|P2|B Actin OS=Mus musculus OX=10090\nMKI\n"
    )
    report = build(source, out, workers=workers, selection=Selection(**settings))
    assert report.counts.filtered == {left_out: 1}


def test_an_empty_split_is_reported(build, fasta, out, capsys):
    build(fasta(">a\nMKV\n"), out, HashSplit(0.001, 0))
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "is empty" in line]
    assert told == (
        "protlm: warning: split valid is empty: 1 sequences at --valid-fraction 0.001; to have "
        "one, prepare them again with a larger --valid-fraction"
    )


def test_invalid_paths_are_rejected(build, out, tmp_path):
    """An output before input is read."""
    missing, file = tmp_path / "none.fasta", tmp_path / "file"
    file.touch()
    for taken in (file, tmp_path, file / "data", Path("/proc/data")):
        with pytest.raises(OutputError, match=str(taken)):
            build(missing, taken)
    for name in (".", "", ".."):
        with pytest.raises(OutputError, match="exists already"):
            build(missing, Path(name))
    for sources, told in (([], "protlm prepare SOURCE"), ([missing], "no such file")):
        with pytest.raises(UserError, match=told):
            build(sources, out)


def peak(out: Path, records: int, workers: int) -> int:
    """The peak of the resident memory of the process that reads and writes, in bytes."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    rng, letters = np.random.default_rng(0), np.frombuffer(b"ACDEFGHIKLMNPQRSTVWY", np.uint8)
    typed = [sys.executable, PROGRAM, out, str(workers)]
    with subprocess.Popen(typed, env=environment, **pipes) as process:
        for number in range(records):
            process.stdin.write(b">p%d\n%b\n" % (number, rng.choice(letters, 300).tobytes()))
        found, told = process.communicate()
    assert re.search(rf"read +{records:,}", told.decode())
    return int(found) * 1024


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_memory_does_not_grow_with_the_input(tmp_path, workers):
    small, large = (peak(tmp_path / f"{n}", n, workers) for n in (100_000, 800_000))
    assert large < small + (64 << 20)
    assert large < 250 << 20


def test_names_of_any_kind_are_read_back(tmp_path):
    """File names are arbitrary, and an accession of a flat file may contain a line separator."""
    listed = {"digit": [("a\tb\x1cc", "x\ny\u2028.fasta", 3), ("\x1d", "\udcff", 4)], "gap": []}
    write_rejected(tmp_path, listed)
    assert read_rejected(tmp_path) == {"digit": [("a b c", "x y .fasta", 3), ("", "\\udcff", 4)]}


def test_an_output_among_the_sources_is_rejected(tmp_path):
    """The unfinished output would be a source when the build resumes."""
    (tmp_path / "a.fasta").write_text(">a\nMKV\n")
    for out in (tmp_path / "data", tmp_path / ".." / tmp_path.name / "data"):
        with pytest.raises(UserError, match=r"is inside .*choose another folder"):
            refuse_inside([tmp_path], out)
    refuse_inside([tmp_path / "a.fasta"], tmp_path / "data")
    refuse_inside([tmp_path], tmp_path / "made" / "data")


@pytest.mark.parametrize("again", ["a.fasta", "folder/../a.fasta", "link.fasta", "folder"])
def test_a_file_by_two_names_is_one_file(tmp_path, again):
    (tmp_path / "a.fasta").touch()
    (tmp_path / "folder").mkdir()
    for link in ("link.fasta", "folder/b.fasta"):
        (tmp_path / link).symlink_to(tmp_path / "a.fasta")
    with pytest.raises(UserError, match=r"\.fasta is given twice"):
        list_files([tmp_path / "a.fasta", tmp_path / again])


def test_folders_are_read_by_name_without_hidden_files_and_faults_are_named(tmp_path):
    for name in ("b.fasta", "a.fasta", ".DS_Store"):
        (tmp_path / name).touch()
    assert list_files([tmp_path]) == [tmp_path / "a.fasta", tmp_path / "b.fasta"]
    (tmp_path / "b.fasta").unlink()
    # Root may read any folder, so the error of the system is simulated.
    refused = PermissionError(13, "Permission denied")
    with mock.patch.object(Path, "is_file", side_effect=refused):
        for path in (tmp_path, tmp_path / "a.fasta"):
            with pytest.raises(InputDataError, match=f"{path} cannot be read: Permission denied"):
                find_sources([path])
    (tmp_path / "a.fasta").unlink()
    with pytest.raises(InputDataError, match="is empty"):
        list_files([tmp_path])
    (tmp_path / "loop.fasta").symlink_to("loop.fasta")
    with pytest.raises(InputDataError, match=r"loop\.fasta is not a file"):
        list_files([tmp_path])
    # A file that is named itself is checked when it is opened.
    assert list_files([tmp_path / "loop.fasta"]) == [tmp_path / "loop.fasta"]
