"""Preparation: every record is kept or counted, and output is atomic."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from protlm.data.records import ReadOptions, Tally, read_records
from protlm.data.records.fasta import FastaBlock
from protlm.data.shards.data_set import open_split, verify
from protlm.data.shards.manifest import Counts, read_manifest
from protlm.data.vocabulary import VOCABULARY
from protlm.data_prep import prepare as preparation
from protlm.data_prep.prepare import PrepareOptions, prepare
from protlm.data_prep.select import Selection
from protlm.data_prep.split import HashSplit, TableSplit
from protlm.system.errors import InputDataError, OutputError, UserError
from protlm.system.paths import sample_dir, sha256_of

TINY = sample_dir() / "uniprot_tiny.fasta.gz"
SAMPLE = sample_dir() / "uniprot_sample.fasta.gz"
BPT1 = sample_dir() / "bpt1_bovin.fasta"
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
    report = prepare(
        [SAMPLE], out, split_rule=TableSplit(TABLE), options=PrepareOptions(shard_residues=1)
    )
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
    assert "duplicate sequence" not in report.counts.noted


@pytest.mark.usefixtures("small_blocks")
def test_the_same_input_gives_the_same_bytes_by_any_number_of_workers(tmp_path, contents):
    for workers in (1, 2, 3):
        prepare(
            [TINY, BPT1],
            tmp_path / str(workers),
            split_rule=HashSplit(0.1, 0.1),
            options=PrepareOptions(workers=workers, shard_residues=5_000),
        )
    one = contents(tmp_path / "1")
    assert len([name for name in one if name.startswith("train/")]) > 5
    assert contents(tmp_path / "2") == one
    assert contents(tmp_path / "3") == one


@pytest.mark.usefixtures("small_blocks")
def test_the_size_of_shards_does_not_change_a_split(tmp_path):
    sizes = (1, 20_000, 10**9)
    for size in sizes:
        options = PrepareOptions(shard_residues=size)
        prepare([TINY], tmp_path / str(size), split_rule=HashSplit(0.2, 0), options=options)
    first, *others = (in_shards(tmp_path / str(size)) for size in sizes)
    assert all(other == first for other in others)
    shards = [read_manifest(tmp_path / str(size)).splits["train"] for size in sizes]
    assert len(shards[0]) > len(shards[1]) > len(shards[2]) == 1
    # Segments are cut over all splits together, and splits without a sequence leave no shard.
    assert all(shard.sequences for some in shards for shard in some)
    numbers = [[shard.file[-8:-3] for shard in some] for some in shards]
    assert all(some == [f"{i:05d}" for i in range(len(some))] for some in numbers)


@pytest.mark.usefixtures("small_blocks")
def test_short_sequences_do_not_accumulate_in_memory(fasta, out, monkeypatch):
    """A shard of peptides has many more names and offsets than a shard of proteins."""
    monkeypatch.setattr("protlm.data_prep.segments._MAX_SEQUENCES", 1_000)
    source = fasta(b"".join(b">p%d\nMKV\n" % number for number in range(5_000)))
    prepare([source], out, split_rule=ALL_TRAIN)
    shards = read_manifest(out).splits["train"]
    assert len(shards) == 5
    # A block of 4 KiB has some 400.
    assert all(shard.sequences < 1_500 for shard in shards)
    assert [name for name, _ in in_shards(out)["train"]] == [f"p{i}" for i in range(5_000)]


@pytest.mark.usefixtures("small_blocks")
def test_every_record_is_in_a_shard_or_counted(fasta, out):
    rng = np.random.default_rng(0)
    kinds = [b"MKVLAW", b"MKVLAW" * 9, b"mkv*", b"", b"M1", b"MK-V", b"MXJ", b"MK*V", b"W" * 200]
    picked = [kinds[i] + b"KR" * rng.integers(0, 9) for i in rng.integers(0, len(kinds), 4_000)]
    source = fasta(b"".join(b">p%d\n%b\n" % (i, letters) for i, letters in enumerate(picked)))
    options = PrepareOptions(
        max_reject_rate=1,
        deduplicate=True,
        shard_residues=1_000,
        selection=Selection(min_length=4, max_length=150),
    )
    counts = prepare([source], out, split_rule=HashSplit(0.2, 0.2), options=options).counts
    names = [name for some in in_shards(out).values() for name, _ in some]
    left_out = sum(counts.rejected.values()) + sum(counts.filtered.values())
    assert len(names) + left_out == counts.records == 4_000
    assert len(set(names)) == len(names)
    assert min(len(counts.rejected), len(counts.filtered), len(counts.changed)) >= 3


def test_every_outcome_is_reported(fasta, out):
    content = b">a\nMKVLW\n>b\nmkvlw*\n>bad one\nMK-V\n>\nMJV\n>e\n\n>f\nMKV\x00\n"
    more = b"".join(b">p%d\nMKVLW%b\n" % (i, b"KR" * (i % 7)) for i in range(1_100))
    prepare([fasta(content), fasta(more + b">g\nM-\n", "more.fasta")], out, split_rule=ALL_TRAIN)
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
    rows = (out / "rejected.tsv").read_text().splitlines()
    assert rows == [
        "reason\tidentifier\tfile\tline",
        "NUL byte\tf\tproteins.fasta\t11",
        "blank sequence\te\tproteins.fasta\t9",
        "gap\tbad\tproteins.fasta\t5",
        "gap\tg\tmore.fasta\t2201",
    ]
    assert [source.file for source in manifest.sources] == ["proteins.fasta", "more.fasta"]
    assert manifest.sources[0].sha256 == sha256_of(fasta(content))
    assert str(out.parent) not in (out / "manifest.json").read_text()


def test_too_many_rejects_stop_and_leave_nothing(fasta, out):
    source = fasta(b">a\nMKV\n" * 49 + b">bad\nMK-V\n")
    with pytest.raises(InputDataError, match=r"1 of 50.*1 gap.*--max-reject-rate 0\.02$") as told:
        prepare([source], out, split_rule=ALL_TRAIN)
    # Nothing is left that would name it otherwise.
    assert f"bad ({source.name}, line 99: gap)" in str(told.value)
    assert_nothing_left(out)
    prepare([source], out, split_rule=ALL_TRAIN, options=PrepareOptions(max_reject_rate=0.02))
    assert len(open_split(out, "train")) == 49


@pytest.mark.usefixtures("small_blocks")
def test_too_many_rejects_of_a_large_input_can_be_allowed_without_reading_it_again(
    fasta, out, monkeypatch, contents
):
    source = fasta(b">a\nMKVLW\n" * 5_000 + b">bad\nMK-V\n" * 500)
    rate = PrepareOptions(shard_residues=1, max_reject_rate=0.2)
    with pytest.raises(InputDataError, match="500 of 5,500"):
        prepare([source], out, split_rule=ALL_TRAIN, options=PrepareOptions(shard_residues=1))
    parsed = []
    records = FastaBlock.records
    monkeypatch.setattr(
        FastaBlock, "records", lambda self, tally: parsed.append(self) or records(self, tally)
    )
    prepare([source], out, split_rule=ALL_TRAIN, options=rate)
    assert 0 < len(parsed) < 4
    prepare([source], out.with_name("whole"), split_rule=ALL_TRAIN, options=rate)
    assert contents(out) == contents(out.with_name("whole"))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("shard_residues", [10_000, 10**9])
def test_a_warning_about_rejects_is_printed_once(fasta, out, monkeypatch, capsys, shard_residues):
    monkeypatch.setattr("protlm.data_prep.reject_rate._ENOUGH_RECORDS", 1_000)
    bad = b">gap\nMK-V\n>gap\nMK-V\n>digit\nMK1V\n" * 10
    early = fasta(b">a\nMKVLW\n" * 970 + bad + b">a\nMKVLW\n" * 9_000)
    options = PrepareOptions(shard_residues=shard_residues)
    prepare([early], out, split_rule=ALL_TRAIN, options=options)
    told = capsys.readouterr().err
    assert told.count("warning") == 1
    assert "30 of the first 1," in told
    assert "(20) for this reason: gap; if more than 1.00%" in told
    late = fasta(b">a\nMKVLW\n" * 9_970 + bad, "late.fasta")
    prepare([late], out.with_name("late"), split_rule=ALL_TRAIN, options=options)
    assert "warning" not in capsys.readouterr().err


def test_no_warning_for_few_records(fasta, out, capsys):
    with pytest.raises(InputDataError, match="1 of 2 records"):
        prepare([fasta(b">a\nMKV\n>bad\nMK-V\n")], out, split_rule=ALL_TRAIN)
    assert "warning" not in capsys.readouterr().err


def test_more_than_a_few_nul_bytes_stop_even_when_rejects_are_allowed(fasta, out):
    source = fasta(b">a\nMKV\n" * 900 + b">bad\nMK\x00V\n")
    with pytest.raises(InputDataError, match="NUL bytes"):
        prepare([source], out, split_rule=ALL_TRAIN, options=PrepareOptions(max_reject_rate=0.5))
    assert_nothing_left(out)


def test_records_missing_from_the_table_are_filtered(fasta, out, tmp_path):
    table = tmp_path / "splits.tsv"
    table.write_text("accession\tsplit\na\ttrain\nunused\ttest\n")
    report = prepare([fasta(b">a\nMKV\n>b\nMKL\n")], out, split_rule=TableSplit(table))
    assert in_shards(out) == {"train": [("a", "MKV")]}
    assert report.counts.filtered == {"in no split": 1}


def test_a_table_of_other_proteins_is_an_error(fasta, out, tmp_path):
    table = tmp_path / "splits.tsv"
    table.write_text("accession\tsplit\nunused\ttest\n")
    with pytest.raises(InputDataError, match=r"none of the 2 records is left.*2 in no split"):
        prepare([fasta(b">a\nMKV\n>b\nMKL\n")], out, split_rule=TableSplit(table))
    assert_nothing_left(out)


def test_duplicates_are_indexed_only_on_request(fasta, out, monkeypatch):
    """The index of TrEMBL's sequences would take 13 GB of disk."""
    built, conclude = {}, preparation._conclude

    def conclude_and_look(work, plan):
        files = [path for path in work.path.rglob("*") if path.is_file()]
        built[deduplicate] = {path.relative_to(work.path).as_posix() for path in files}
        return conclude(work, plan)

    monkeypatch.setattr(preparation, "_conclude", conclude_and_look)
    source = fasta(b">a\nMKV\n>b\nMKL\n>c\nMKV\n")
    for deduplicate in (False, True):
        options = PrepareOptions(deduplicate=deduplicate)
        target = out.with_name(f"data{deduplicate}")
        prepare([source], target, split_rule=ALL_TRAIN, options=options)
    assert "digests/first-00000.bin" in built[True]
    assert built[False] == built[True] - {"digests/first-00000.bin"}


def test_later_copies_can_be_omitted(fasta, out):
    one, other = fasta(b">a\nMKV\n>b\nMKL\n>c\nMKV\n"), fasta(b">d\nMKL\n>e\nMKW\n", "other")
    options = PrepareOptions(deduplicate=True)
    report = prepare([one, other], out, split_rule=ALL_TRAIN, options=options)
    assert in_shards(out) == {"train": [("a", "MKV"), ("b", "MKL"), ("e", "MKW")]}
    assert report.counts.filtered == {"duplicate sequence": 2}
    assert not report.counts.noted


@pytest.mark.usefixtures("small_blocks")
def test_the_first_copy_is_kept_in_any_split(fasta, out, tmp_path):
    """Compared with a Python set, over several blocks, segments and splits."""
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 700, 3_000)
    pairs = [(f"p{i}", "MKV" + "LA" * (n % 50) + "KRDEW"[n % 5] * n) for i, n in enumerate(numbers)]
    table = tmp_path / "splits.tsv"
    splits = [("train", "valid", "test")[i] for i in rng.integers(0, 3, len(pairs))]
    rows = [f"{name}\t{split}" for (name, _), split in zip(pairs, splits, strict=True)]
    table.write_text("\n".join(["accession\tsplit", *rows]))
    expected, seen = {}, set()
    for (name, sequence), split in zip(pairs, splits, strict=True):
        if sequence not in seen:
            seen.add(sequence)
            expected.setdefault(split, []).append((name, sequence))
    source = fasta("".join(f">{name}\n{sequence}\n" for name, sequence in pairs).encode())
    options = PrepareOptions(deduplicate=True, shard_residues=30_000, workers=2)
    report = prepare([source], out, split_rule=TableSplit(table), options=options)
    assert in_shards(out) == expected
    assert report.counts.filtered == {"duplicate sequence": len(pairs) - len(seen)}
    assert len(read_manifest(out).splits["train"]) > 3


def test_unselected_records_are_filtered(out):
    options = PrepareOptions(selection=Selection(min_length=100, max_length=500))
    report = prepare([TINY], out, split_rule=ALL_TRAIN, options=options)
    lengths = [len(record.sequence) for record in read_records(TINY, Tally())]
    assert len(open_split(out, "train")) == sum(100 <= n <= 500 for n in lengths)
    assert report.counts.filtered == {
        "shorter than 100 residues": sum(n < 100 for n in lengths),
        "longer than 500 residues": sum(n > 500 for n in lengths),
    }


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("selection", "filtered"),
    [
        (Selection(no_fragments=True), {"fragment": 1}),
        (Selection(organisms=("9606",)), {"other organism": 1}),
        (Selection(organisms=("Mus musculus",)), {"other organism": 2}),
    ],
)
def test_headers_are_parsed_for_organisms_only_if_needed(fasta, out, selection, filtered, workers):
    source = fasta(
        b">sp|P1|A Actin OS=Homo sapiens OX=9606\nMKV\n"
        b">sp|P2|B Actin (Fragment) OS=Homo sapiens OX=9606\nMKL\n"
        b">sp|P3|C Actin OS=Mus musculus OX=10090\nMKI\n"
    )
    options = PrepareOptions(workers=workers, selection=selection)
    report = prepare([source], out, split_rule=ALL_TRAIN, options=options)
    assert report.counts.filtered == filtered


def test_folders_are_read_by_name_and_hold_sequences_alone(tmp_path, out):
    folder = tmp_path / "release"
    folder.mkdir()
    for name, protein in (("b.fasta", b">b\nMKL\n"), ("a.fasta", b">a\nMKV\n")):
        (folder / name).write_bytes(protein)
    prepare([folder], out, split_rule=ALL_TRAIN)
    assert in_shards(out) == {"train": [("a", "MKV"), ("b", "MKL")]}
    (folder / "README").write_text("All of UniProt\n")
    with pytest.raises(InputDataError, match="README, line 1"):
        prepare([folder], tmp_path / "other", split_rule=ALL_TRAIN)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", [".", "", ".."])
def test_the_current_folder_is_not_an_output(fasta, name):
    with pytest.raises(OutputError, match="exists already"):
        prepare([fasta(b">a\nMKV\n")], Path(name), split_rule=ALL_TRAIN)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b">a\n\n", r"none of the 1 records can be used: 1 blank sequence; .* a \(.*, line 1"),
        (b"MKV\n", "line 1"),
        (b"@a\nACGT\n+\nIIII\n", "FASTQ"),
        (TINY.read_bytes()[:-100], "truncated"),
        (b">a\n" + b"ACGT" * 20 + b"\n", "--allow-nucleotides"),
    ],
)
def test_unusable_input_leaves_nothing(fasta, out, content, message):
    with pytest.raises(InputDataError, match=message):
        prepare(
            [fasta(content)], out, split_rule=ALL_TRAIN, options=PrepareOptions(max_reject_rate=1)
        )
    assert_nothing_left(out)


def test_nucleotides_can_be_allowed(fasta, out):
    source = fasta(b">a\n" + b"ACGT" * 20 + b"\n")
    options = PrepareOptions(reading=ReadOptions(allow_nucleotides=True))
    prepare([source], out, split_rule=ALL_TRAIN, options=options)
    assert in_shards(out) == {"train": [("a", "ACGT" * 20)]}


def test_a_damaged_second_source_leaves_nothing(fasta, out):
    with pytest.raises(InputDataError, match="second"):
        prepare([TINY, fasta(b"junk", "second")], out, split_rule=ALL_TRAIN)
    assert_nothing_left(out)


def test_an_invalid_output_is_rejected_before_input_is_read(tmp_path):
    missing, file = tmp_path / "none.fasta", tmp_path / "file"
    file.touch()
    for out in (file, tmp_path, file / "data", Path("/proc/data")):
        with pytest.raises(OutputError, match=str(out)):
            prepare([missing], out, split_rule=ALL_TRAIN)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_reject_rate": 1.5},
        {"max_reject_rate": float("nan")},
        {"shard_residues": 0},
        {"workers": 0},
        {"workers": 1_000},
    ],
)
def test_invalid_settings_are_rejected(wrong):
    name, value = next(iter(wrong.items()))
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} {value}"):
        PrepareOptions(**wrong)


def test_a_source_given_twice_is_rejected(out):
    with pytest.raises(UserError, match="given twice"):
        prepare([TINY, TINY.parent / ".." / "sample" / TINY.name], out, split_rule=ALL_TRAIN)


def test_a_missing_source_is_an_error(out, tmp_path):
    with pytest.raises(UserError, match="protlm prepare SOURCE"):
        prepare([], out, split_rule=ALL_TRAIN)
    with pytest.raises(InputDataError, match="no such file"):
        prepare([tmp_path / "none.fasta"], out, split_rule=ALL_TRAIN)
