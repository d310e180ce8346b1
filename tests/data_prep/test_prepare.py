"""Preparation: every record kept or counted, complete or not there at all."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.prepare import prepare
from data_prep.split import HashSplit, TableSplit
from protlm.data.manifest import read_manifest
from protlm.data.records import Tally
from protlm.data.records.fasta import read_fasta
from protlm.data.shards import open_split, verify
from protlm.data.vocabulary import VOCABULARY
from protlm.errors import InputDataError, OutputError, UserError
from protlm.paths import sample_dir, sha256_of

TINY = sample_dir() / "uniprot_tiny.fasta.gz"
SAMPLE = sample_dir() / "uniprot_sample.fasta.gz"
TABLE = sample_dir() / "uniprot_sample.splits.tsv.gz"
ALL_TRAIN = HashSplit(valid_fraction=0, test_fraction=0)


@pytest.fixture
def fasta(tmp_path):
    def write(content: bytes, name="proteins.fasta") -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "output" / "data"


def in_shards(directory: Path) -> dict[str, list[tuple[str, str]]]:
    found = {}
    for split in read_manifest(directory).splits:
        reader = open_split(directory, split)
        found[split] = [
            (reader.identifier(i), VOCABULARY.decode(reader[i])) for i in range(len(reader))
        ]
    return found


def assert_nothing_left(out: Path):
    assert not out.exists()
    assert not out.parent.exists() or list(out.parent.iterdir()) == []


def test_every_sequence_of_the_sample_is_in_its_split(out):
    report = prepare([SAMPLE], out, split_rule=TableSplit(TABLE), shard_residues=1_000_000)
    with gzip.open(TABLE, "rt") as file:
        split_of = dict(line.split("\t")[:2] for line in file)
    expected: dict[str, list[tuple[str, str]]] = {}
    for record in read_fasta(SAMPLE, Tally()):
        pair = (record.identifier, record.sequence)
        expected.setdefault(split_of[record.identifier], []).append(pair)
    assert in_shards(out) == expected
    assert verify(out) == []
    assert {split: size.sequences for split, size in report.splits.items()} == {
        "train": 10_240, "valid": 540, "test_iid": 614, "test_remote_homolog": 132,
        "test_ood_cluster": 315, "test_ood_family": 532,
    }  # fmt: skip
    assert report.splits["train"].shards == 5
    assert report.counts.records == 12_373
    assert not report.counts.rejected
    assert report.duplicate_sequences == 0


def test_the_same_input_gives_the_same_bytes(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    for out in (one, other):
        prepare([TINY], out, split_rule=HashSplit(0.1, 0.1), shard_residues=5_000)
    files = sorted(p.relative_to(one) for p in one.rglob("*") if p.is_file())
    assert len(files) > 10
    assert files == sorted(p.relative_to(other) for p in other.rglob("*") if p.is_file())
    for file in files:
        assert (one / file).read_bytes() == (other / file).read_bytes()


def test_shards_do_not_change_what_is_in_a_split(tmp_path):
    sizes = (1, 5_000, 10**9)
    for size in sizes:
        prepare([TINY], tmp_path / str(size), split_rule=HashSplit(0.2, 0), shard_residues=size)
    first, *others = (in_shards(tmp_path / str(size)) for size in sizes)
    assert all(other == first for other in others)
    assert len(read_manifest(tmp_path / "1").splits["train"]) == len(first["train"])


def test_what_became_of_the_records_is_reported(fasta, out):
    content = b">a\nMKVLW\n>b\nmkvlw*\n>bad one\nMK-V\n>\nMJV\n>e\n\n>f\nMKV\x00\n"
    more = b"".join(b">p%d\nMKVLW%b\n" % (i, b"KR" * (i % 7)) for i in range(1_100))
    prepare([fasta(content), fasta(more, "more.fasta")], out, split_rule=ALL_TRAIN)
    report, manifest = json.loads((out / "report.json").read_text()), read_manifest(out)
    assert report["counts"] == {
        "records": 1_106,
        "rejected": {"gap": 1, "blank sequence": 1, "NUL byte": 1},
        "changed": {
            "J written as X": 1,
            "bare '>' named by its line": 1,
            "lower case raised": 1,
            "terminal '*' removed": 1,
        },
        "noted": {},
    }
    assert manifest.counts.rejected == report["counts"]["rejected"]
    assert report["splits"]["train"]["sequences"] == 1_103
    # Two of the three others, and all but the first of each of the seven kinds.
    assert report["duplicate_sequences"] == 1_103 - 8
    rows = (out / "rejected.tsv").read_text().splitlines()
    assert rows == [
        "reason\tidentifier\tline", "NUL byte\tf\t11", "blank sequence\te\t9", "gap\tbad\t5"
    ]  # fmt: skip
    assert [source.file for source in manifest.sources] == ["proteins.fasta", "more.fasta"]
    assert manifest.sources[0].sha256 == sha256_of(fasta(content))
    assert str(out.parent) not in (out / "manifest.json").read_text()


def test_too_many_rejects_stop_and_leave_nothing(fasta, out):
    source = fasta(b">a\nMKV\n" * 49 + b">bad\nMK-V\n")
    with pytest.raises(InputDataError, match=r"1 of 50.*1 gap.*--max-reject-rate 0\.02$"):
        prepare([source], out, split_rule=ALL_TRAIN)
    assert_nothing_left(out)
    prepare([source], out, split_rule=ALL_TRAIN, max_reject_rate=0.02)
    assert len(open_split(out, "train")) == 49


def test_more_than_a_few_nul_bytes_stop_even_when_rejects_are_allowed(fasta, out):
    source = fasta(b">a\nMKV\n" * 900 + b">bad\nMK\x00V\n")
    with pytest.raises(InputDataError, match="NUL bytes"):
        prepare([source], out, split_rule=ALL_TRAIN, max_reject_rate=0.5)
    assert_nothing_left(out)


def test_records_that_the_table_lacks_are_rejected(fasta, out, tmp_path):
    table = tmp_path / "splits.tsv"
    table.write_text("accession\tsplit\na\ttrain\nunused\ttest\n")
    source = fasta(b">a\nMKV\n>b\nMKL\n")
    with pytest.raises(InputDataError, match="1 in no split"):
        prepare([source], out, split_rule=TableSplit(table))
    assert_nothing_left(out)
    prepare([source], out, split_rule=TableSplit(table), max_reject_rate=0.5)
    assert in_shards(out) == {"train": [("a", "MKV")]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b">a\n\n", "none of the 1 records"),
        (b"MKV\n", "line 1"),
        (b"@a\nACGT\n+\nIIII\n", "FASTQ"),
        (TINY.read_bytes()[:-100], "truncated"),
        (b">a\n" + b"ACGT" * 20 + b"\n", "--allow-nucleotides"),
    ],
)
def test_input_that_is_no_use_leaves_nothing(fasta, out, content, message):
    with pytest.raises(InputDataError, match=message):
        prepare([fasta(content)], out, split_rule=ALL_TRAIN, max_reject_rate=1)
    assert_nothing_left(out)


def test_nucleotides_can_be_allowed(fasta, out):
    source = fasta(b">a\n" + b"ACGT" * 20 + b"\n")
    prepare([source], out, split_rule=ALL_TRAIN, allow_nucleotides=True)
    assert in_shards(out) == {"train": [("a", "ACGT" * 20)]}


def test_a_damaged_second_source_leaves_nothing(fasta, out):
    with pytest.raises(InputDataError, match="second"):
        prepare([TINY, fasta(b"junk", "second")], out, split_rule=ALL_TRAIN, shard_residues=1_000)
    assert_nothing_left(out)


def test_a_source_that_grows_meanwhile_is_an_error(fasta, out):
    source = fasta(b">a\nMKV\n" * 10)

    class Appending:
        def split_of(self, record):
            with source.open("ab") as file:
                file.write(b"\n")
            return "train"

        def describe(self):
            return {}

    with pytest.raises(InputDataError, match="changed while it was read"):
        prepare([source], out, split_rule=Appending())
    assert_nothing_left(out)


def test_an_output_that_cannot_be_is_refused_before_anything_is_read(tmp_path):
    missing, file = tmp_path / "none.fasta", tmp_path / "file"
    file.touch()
    for out in (file, tmp_path, file / "data", Path("/proc/data")):
        with pytest.raises(OutputError, match=str(out)):
            prepare([missing], out, split_rule=ALL_TRAIN)


@pytest.mark.parametrize("wrong", [{"max_reject_rate": 1.5}, {"shard_residues": 0}])
def test_impossible_settings_are_refused(out, wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        prepare([TINY], out, split_rule=ALL_TRAIN, **wrong)
    assert_nothing_left(out)


def test_there_must_be_a_source(out, tmp_path):
    with pytest.raises(UserError, match="protlm prepare SOURCE"):
        prepare([], out, split_rule=ALL_TRAIN)
    with pytest.raises(InputDataError, match="no such file"):
        prepare([tmp_path / "none.fasta"], out, split_rule=ALL_TRAIN)


FULL_DISK = """
import resource, sys
from pathlib import Path
from data_prep.prepare import prepare
from data_prep.split import HashSplit
from protlm.errors import exit_with_message

# A limit on the size of files is what a full disk is to those who write.
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
split = HashSplit(valid_fraction=0, test_fraction=0)
exit_with_message(lambda: prepare([Path(sys.argv[1])], Path(sys.argv[2]), split_rule=split))
"""


def test_a_full_disk_ends_with_one_sentence_and_nothing_left(out):
    command = [sys.executable, "-c", FULL_DISK, str(TINY), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert f"{out}: no space left" in done.stderr
    assert "Traceback" not in done.stderr
    assert_nothing_left(out)
