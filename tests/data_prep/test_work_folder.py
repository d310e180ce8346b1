"""What a build keeps on disk: a journal of what is finished, and a set of digests."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from protlm.data.records import Tally
from protlm.data.shards.manifest import ShardEntry, SourceEntry
from protlm.data_prep.duplicates import DigestSet
from protlm.data_prep.sources import Place
from protlm.data_prep.split import HashSplit
from protlm.data_prep.work_folder import Journal, Segment
from protlm.system.errors import InputDataError
from tests.fixtures.commands import run_python

SEGMENTS = [
    Segment(
        end=Place(0, 3, 12345),
        sources=(),
        shards={"train": ShardEntry("train/shard-00000.h5", 2, 30, 2_000, "a" * 64)},
        tally=Tally(
            5,
            Counter(gap=1),
            Counter({"fragment": 2}),
            Counter({"lower case raised": 1}),
            Counter(),
            {"gap": [("P1", "wéird \udc80 name.fasta", 7)]},
        ),
    ),
    Segment(Place(2, 0, 0), (SourceEntry("x", 3, "b" * 64),), {}, Tally(1)),
]


def test_a_round_trip_changes_nothing(tmp_path):
    journal = Journal(tmp_path / "journal")
    assert journal.segments == []
    for segment in SEGMENTS:
        journal.append(segment)
    assert Journal(tmp_path / "journal").segments == journal.segments == SEGMENTS
    first = tmp_path / "journal" / "segment-00000.json"
    first.unlink()
    with pytest.raises(InputDataError, match=r"segment-00000\.json was finished, and is missing"):
        Journal(tmp_path / "journal")


OPTIONS = {"rule": HashSplit(0.1, 0.1), "shard_residues": 20_000, "deduplicate": True}


@pytest.fixture
def begun(tmp_path, build):
    """A build that ended at a damaged record, with several segments finished."""
    source = tmp_path / "proteins.fasta"
    proteins = "".join(f">p{i}\nMKV{'LAW' * (i % 50)}{'K' * (i // 50)}\n" for i in range(2_000))
    source.write_text(f"{proteins};comment\n")
    with pytest.raises(InputDataError, match="comment"):
        build(source, tmp_path / "data", **OPTIONS)
    return source, tmp_path / "data", tmp_path / "data.partial"


@pytest.mark.usefixtures("small_blocks")
def test_finished_parts_are_kept_and_files_of_a_killed_build_are_removed(begun, build, capsys):
    source, out, partial = begun
    left = [partial / "data" / "train" / "shard-00009.h5", partial / "data" / "train" / ".x.part"]
    for path in left:
        path.write_text("half a shard")
    with pytest.raises(InputDataError, match="comment"):
        build(source, out, **OPTIONS)
    assert not any(path.exists() for path in left)
    told = capsys.readouterr().err
    assert f"resuming {partial} after" in told
    assert f"finished parts are kept in {partial}" in told


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("file", "is_flipped"),
    [
        ("journal/segment-00001.json", False),
        ("data/train/shard-00001.h5", False),
        ("data/train/shard-00001.h5", True),
        ("digests/first-00000.bin", False),
        ("digests/first-00000.bin", True),
    ],
)
def test_damage_to_finished_parts_is_one_sentence(begun, build, file, is_flipped):
    """Without a digest, a duplicate would not be found."""
    source, out, partial = begun
    content = bytearray((partial / file).read_bytes())
    content[100] ^= is_flipped
    (partial / file).write_bytes(content if is_flipped else content[:-3])
    with pytest.raises(InputDataError, match=f"{partial / file}.*damaged now: start over"):
        build(source, out, **OPTIONS)
    source.write_text(source.read_text().replace(";comment\n", ""))
    build(source, out, **OPTIONS, restart=True)
    assert out.is_dir()
    assert not partial.exists()


PROGRAM = Path(__file__).parent / "programs" / "grow_digest_table.py"


def digests(rng, size, *, kinds):
    """Digests of which many are equal and many more have the same slot."""
    picked = rng.integers(0, kinds, size).astype(np.uint64)
    high = (picked % np.uint64(97)) << np.uint64(57)
    return np.stack([high, picked], axis=1)


@pytest.mark.parametrize("memory_slots", [2, 1 << 8, 1 << 20])
def test_it_agrees_with_a_set(tmp_path, memory_slots):
    rng = np.random.default_rng(memory_slots)
    known, truth = DigestSet(tmp_path / "table", memory_slots=memory_slots), set()
    for _ in range(30):
        some = digests(rng, int(rng.integers(0, 700)), kinds=6_000)
        expected = []
        for digest in map(tuple, some.tolist()):
            expected.append(digest not in truth)
            truth.add(digest)
        assert known.add(some).tolist() == expected
    assert known._size == len(truth)
    assert not known.add(np.array(sorted(truth), np.uint64)).any()
    assert (tmp_path / "table").exists() == (memory_slots < 1 << 20)


def test_the_first_and_the_last_digest_are_ordinary(tmp_path):
    """Slots wrap around at the end."""
    known = DigestSet(tmp_path / "table", memory_slots=2)
    last = np.full((1_000, 2), 2**64 - 1, np.uint64)
    last[:, 1] = np.arange(1_000)
    assert known.add(last).all()
    assert not known.add(last).any()
    zeros = np.zeros((2, 2), np.uint64)
    assert known.add(zeros).tolist() == [True, False]
    assert known.add(zeros).tolist() == [False, False]


@pytest.mark.slow
def test_a_table_on_disk_takes_no_memory_as_it_grows(tmp_path):
    size, grown = map(int, run_python(PROGRAM, tmp_path / "table", 40).stdout.split())
    assert size == 6_000_000
    assert (tmp_path / "table").stat().st_size > 200 << 20
    assert grown < 128 << 20
