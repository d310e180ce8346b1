"""The journal: a round trip, and one sentence for damage."""

import json
from collections import Counter

import numpy as np
import pytest

from protlm.data.records import Tally
from protlm.data.shards.manifest import ShardEntry, SourceEntry
from protlm.data_prep.prepare import PrepareOptions, prepare
from protlm.data_prep.sources import Place
from protlm.data_prep.split import HashSplit
from protlm.data_prep.work_folder import Journal, Segment
from protlm.system.errors import InputDataError

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
        digests_sha256="c" * 64,
    ),
    Segment(Place(2, 0, 0), (SourceEntry("x", 3, "b" * 64),), {}, Tally(1), "d" * 64),
]


def test_a_round_trip_changes_nothing(tmp_path):
    journal = Journal(tmp_path / "journal")
    assert journal.segments == []
    for segment in SEGMENTS:
        journal.append(segment)
    assert Journal(tmp_path / "journal").segments == journal.segments == SEGMENTS


def test_a_flipped_bit_in_any_byte_of_an_entry_is_found(tmp_path):
    for segment in SEGMENTS:
        Journal(tmp_path).append(segment)
    path = tmp_path / "segment-00000.json"
    content = path.read_bytes()
    meant_the_same = 0
    for position, bit in enumerate(np.random.default_rng(0).integers(0, 8, len(content))):
        flipped = bytearray(content)
        flipped[position] ^= 1 << int(bit)
        path.write_bytes(flipped)
        try:
            assert Journal(tmp_path).segments == SEGMENTS
            meant_the_same += 1
        except InputDataError as error:
            assert f"{path} is missing or damaged" in str(error)
            assert "--restart" in str(error)
    # White space, and the case of hexadecimal escapes.
    assert meant_the_same < 0.02 * len(content)


def test_a_missing_entry_is_found(tmp_path):
    for segment in SEGMENTS:
        Journal(tmp_path).append(segment)
    (tmp_path / "segment-00000.json").unlink()
    with pytest.raises(InputDataError, match=r"segment-00000\.json is missing"):
        Journal(tmp_path)


@pytest.fixture
def begun(tmp_path):
    """A build that ended at a damaged record, with several segments finished."""
    source = tmp_path / "proteins.fasta"
    proteins = "".join(f">p{i}\nMKV{'LAW' * (i % 50)}{'K' * (i // 50)}\n" for i in range(2_000))
    source.write_text(f"{proteins};comment\n")
    with pytest.raises(InputDataError, match="comment"):
        build(source, tmp_path / "data")
    return source, tmp_path / "data", tmp_path / "data.partial"


def build(source, out, **options):
    settings = PrepareOptions(shard_residues=20_000, deduplicate=True, **options)
    prepare([source], out, split_rule=HashSplit(0.1, 0.1), options=settings)


@pytest.mark.usefixtures("small_blocks")
def test_finished_parts_are_kept_and_reported(begun, capsys):
    source, out, partial = begun
    with pytest.raises(InputDataError, match="comment"):
        build(source, out)
    told = capsys.readouterr().err
    assert f"resuming {partial} after" in told
    assert f"finished parts are kept in {partial}" in told


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "file",
    [
        "journal/segment-00001.json",
        "data/train/shard-00001.h5",
        "digests/first-00000.bin",
        "digests/first-00000.bin, flipped",
    ],
)
def test_damage_to_finished_parts_is_one_sentence(begun, file):
    """Without a digest, a duplicate would not be found."""
    source, out, partial = begun
    file, _, is_flipped = file.partition(", ")
    content = bytearray((partial / file).read_bytes())
    content[100] ^= bool(is_flipped)
    (partial / file).write_bytes(content if is_flipped else content[:-3])
    with pytest.raises(InputDataError, match=f"{partial / file}.*damaged.*--restart"):
        build(source, out)
    source.write_text(source.read_text().replace(";comment\n", ""))
    build(source, out, restart=True)
    assert out.is_dir()
    assert not partial.exists()


@pytest.mark.usefixtures("small_blocks")
def test_unfinished_files_of_a_killed_build_are_removed(begun):
    source, out, partial = begun
    left = [partial / "data" / "train" / "shard-00009.h5", partial / "data" / "train" / ".x.part"]
    for path in left:
        path.write_text("half a shard")
    with pytest.raises(InputDataError, match="comment"):
        build(source, out)
    assert not any(path.exists() for path in left)


def test_entries_contain_no_python_objects(tmp_path):
    Journal(tmp_path).append(SEGMENTS[0])
    fields = json.loads((tmp_path / "segment-00000.json").read_text())
    assert set(fields) == {"sha256", "content"}
