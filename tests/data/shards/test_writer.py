"""Shards and cluster indexes as they are written: valid HDF5, aligned; damage is reported."""

import json
import pickle
import re
from itertools import pairwise

import h5py
import numpy as np
import pytest

from protlm.data.shards import cluster_index, writer
from protlm.data.shards.data_set import open_clusters, open_split, verify
from protlm.data.shards.manifest import MANIFEST, read_manifest
from protlm.data.shards.writer import PackedSequences, write_cluster_index, write_shard
from protlm.data.vocabulary import VOCABULARY
from protlm.system.errors import InputDataError, OutputError, UserError
from protlm.system.paths import sha256_of

FILE = "train/shard-00000.h5"


def packed(pairs):
    return PackedSequences.pack([name for name, _ in pairs], [s.encode() for _, s in pairs])


PAIRS = [("a", "MKV"), ("bβ", "W"), ("c", "LAGVSERTIDPKQNFYMHWCXBUZO"), ("", "M" * 1_000)]


def test_h5py_reads_what_was_written(tmp_path):
    entry = write_shard(tmp_path, FILE, [packed(PAIRS[:1]), packed([]), packed(PAIRS[1:])])
    path = tmp_path / FILE
    assert (entry.file, entry.sequences, entry.residues) == (FILE, 4, 1_029)
    assert (entry.bytes, entry.sha256) == (path.stat().st_size, sha256_of(path))
    with h5py.File(path) as file:
        assert sorted(file) == ["id_offsets", "ids", "offsets", "tokens"]
        assert VOCABULARY.decode(file["tokens"][:]) == "".join(s for _, s in PAIRS)
        assert file["offsets"][:].tolist() == [0, 3, 4, 29, 1_029]
        assert file["ids"][:].tobytes() == "abβc".encode()
        assert file["id_offsets"][:].tolist() == [0, 1, 4, 5, 5]
        for name in file:
            assert file[name].id.get_create_plist().get_layout() == h5py.h5d.CONTIGUOUS
            assert not file[name].id.get_create_plist().get_obj_track_times()


def test_the_arrays_are_aligned_for_readers_that_map_them(tmp_path):
    for length in range(1, 130, 13):
        write_shard(tmp_path, f"{length}/shard-00000.h5", [packed([("a", "M" * length)])])
        with h5py.File(tmp_path / f"{length}/shard-00000.h5") as file:
            assert [file[name].id.get_offset() % 64 for name in file] == [0] * 4


def test_the_division_into_parts_does_not_matter(tmp_path):
    one = write_shard(tmp_path, "a/shard-00000.h5", [packed(PAIRS)])
    other = write_shard(tmp_path, "b/shard-00000.h5", [packed([pair]) for pair in PAIRS])
    assert one.sha256 == other.sha256
    # Identifiers may be missing.
    write_shard(tmp_path, FILE, [packed([("", "MKV"), ("", "W")])])
    with h5py.File(tmp_path / FILE) as file:
        assert file["ids"].shape == (0,)
        assert file["id_offsets"][:].tolist() == [0, 0, 0]


def test_some_of_the_sequences_can_be_kept():
    rng = np.random.default_rng(0)
    for _ in range(20):
        is_kept = rng.random(len(PAIRS)) < 0.5
        kept = packed(PAIRS).keep(is_kept)
        expected = packed([pair for pair, keep in zip(PAIRS, is_kept, strict=True) if keep])
        for name in ("tokens", "lengths", "ids", "id_lengths"):
            assert getattr(kept, name).tolist() == getattr(expected, name).tolist()


def test_a_shard_is_never_overwritten(tmp_path):
    write_shard(tmp_path, FILE, [packed(PAIRS)])
    with pytest.raises(OutputError, match="exists"):
        write_shard(tmp_path, FILE, [packed(PAIRS)])
    assert [path.name for path in (tmp_path / "train").iterdir()] == ["shard-00000.h5"]


INDEX = "train/clusters.h5"
TOP = 2**64 - 1


@pytest.fixture
def hashes():
    """Clusters of the 40 proteins: some large, some of one, some at the ends of the range."""
    rng = np.random.default_rng(1)
    several = [0, 1, 2**63, TOP, *rng.integers(2**62, 2**63, 6).tolist()]
    return [*(several[i] for i in rng.integers(0, 10, 36)), *range(5, 9)]


@pytest.fixture
def clustered(make_data_set, proteins, hashes):
    return make_data_set(proteins, "clustered", hashes)


def groups(hashes):
    """The members of each cluster in order, sorted by hash: the reference."""
    return [[i for i, h in enumerate(hashes) if h == one] for one in sorted(set(hashes))]


def read_index(path):
    with h5py.File(path) as file:
        assert sorted(file) == ["members", "offsets"]
        offsets, members = file["offsets"][:], file["members"][:]
        assert {offsets.dtype, members.dtype} == {np.dtype("<u8")}
        for name in file:
            assert file[name].id.get_create_plist().get_layout() == h5py.h5d.CONTIGUOUS
            assert file[name].id.get_offset() % 64 == 0
    return [members[a:b].tolist() for a, b in pairwise(offsets)]


def test_every_sequence_is_in_its_cluster(clustered, hashes):
    path = clustered / INDEX
    assert read_index(path) == groups(hashes)
    manifest = read_manifest(clustered)
    entry = manifest.clusters.indexes["train"]
    assert (entry.file, entry.clusters) == (INDEX, len(set(hashes)))
    assert (entry.bytes, entry.sha256) == (path.stat().st_size, sha256_of(path))
    assert verify(clustered) == []
    # The same shards give the same bytes.
    path.unlink()
    assert write_cluster_index(clustered, "train", manifest.splits["train"]) == entry


def test_clusters_of_many_hashes(tmp_path):
    """Hashes that are distributed like those of names."""
    rng = np.random.default_rng(0)
    hashes = np.repeat(rng.integers(0, 2**64, 2_000, dtype=np.uint64), rng.integers(1, 6, 2_000))
    rng.shuffle(hashes)
    some = PackedSequences.pack(["p"] * len(hashes), [b"M"] * len(hashes), hashes)
    entry = write_cluster_index(tmp_path, "train", [write_shard(tmp_path, FILE, [some])])
    assert entry.clusters == 2_000
    assert read_index(tmp_path / INDEX) == groups(hashes.tolist())


def test_documents_before_each_cluster_are_counted(clustered, hashes, monkeypatch):
    """In blocks of clusters."""
    monkeypatch.setattr(cluster_index, "_BLOCK", 3)
    index, sizes = open_clusters(clustered, "train"), [*map(len, groups(hashes))]
    assert index.sizes(np.array([2, 0, 2])).tolist() == [sizes[2], sizes[0], sizes[2]]
    for most in (1, 2, 100):
        starts = index.starts(most)
        assert np.diff(starts.astype(int)).tolist() == [-(-size // most) for size in sizes]
        assert (starts[0], starts.dtype) == (0, np.uint8)


def test_members_take_turns_from_any_start(clustered, hashes):
    """Also in another process."""
    index = pickle.loads(pickle.dumps(open_clusters(clustered, "train")))
    truth = groups(hashes)
    assert len(index) == len(truth)
    clusters = np.arange(len(truth))
    for start in (0, 1, 10**9 + 7, TOP):
        for turn in (0, 1, 2, 10**12):
            starts = np.full(len(truth), start, np.uint64)
            found = index.members(clusters, starts, turn).tolist()
            assert found == [one[(start + turn) % len(one)] for one in truth]


def test_a_full_disk_leaves_nothing(clustered, fail_at):
    (clustered / INDEX).unlink()
    shards = read_manifest(clustered).splits["train"]
    fail_at(writer, "complete_file", OSError(28, "No space left on device"))
    with pytest.raises(OutputError, match=rf"{clustered / INDEX}: no space left"):
        write_cluster_index(clustered, "train", shards)
    assert not (clustered / INDEX).exists()


def test_a_shard_without_clusters_cannot_be_indexed(data_set):
    shards = read_manifest(data_set).splits["train"]
    with pytest.raises(InputDataError, match=r"shard-00000\.h5 has no clusters"):
        write_cluster_index(data_set, "train", shards)


def test_a_data_set_without_clusters_is_unchanged(data_set, clustered):
    """The bytes of shards and manifest, and reading them, are unchanged."""
    assert sha256_of(data_set / "train/shard-00000.h5") == (
        "7be8ec2fbbb35866f9a72636e616a93abaa91cc87070160a1e0055c5c11f34cf"
    )
    assert "clusters" not in json.loads((data_set / MANIFEST).read_text())
    assert verify(data_set) == []
    with pytest.raises(UserError, match=f"{data_set} was prepared without clusters"):
        open_clusters(data_set, "train")
    with pytest.raises(UserError, match="no split 'other'"):
        open_clusters(clustered, "other")


def updated_manifest(directory, **changed):
    """Makes the manifest agree with the current index."""
    fields = json.loads((directory / MANIFEST).read_text())
    path = directory / INDEX
    entry = fields["clusters"]["indexes"]["train"]
    entry.update({"bytes": path.stat().st_size, "sha256": sha256_of(path), **changed})
    return json.dumps(fields)


def assert_found(directory, how=("full",), *, by_use=True):
    name = re.escape(str(directory / INDEX))
    for verify_by in how:
        with pytest.raises(InputDataError, match=rf"{name}.*protlm data verify {directory}"):
            open_clusters(directory, "train", verify=verify_by)
    assert any(re.search(name, fault) for fault in verify(directory))
    # And where nothing was looked at before.
    if by_use:
        with pytest.raises(InputDataError, match=name):
            index = open_clusters(directory, "train", verify="sizes")
            for turn in range(40):
                index.members(np.arange(len(index)), np.zeros(len(index), np.uint64), turn)


@pytest.mark.parametrize("size", [None, 0, 1, 100, -1])
def test_a_missing_or_truncated_index_is_rejected(clustered, size):
    path = clustered / INDEX
    content = path.read_bytes()[:size]
    path.unlink()
    if size is not None:
        path.write_bytes(content)
    assert_found(clustered, ("full", "sizes"))


def test_every_flipped_bit_is_found(clustered):
    path = clustered / INDEX
    content = path.read_bytes()
    for bit in np.random.default_rng(0).integers(0, 8 * len(content), 50).tolist():
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(flipped)
        assert_found(clustered, by_use=False)


INVALID = [("offsets", 2, value) for value in (0, "same", 41, TOP)]
INVALID += [("offsets", 0, 1), ("offsets", -1, 39), ("members", 0, 40), ("members", 5, TOP)]


@pytest.mark.parametrize(("array", "place", "value"), INVALID)
def test_invalid_numbers_are_found(clustered, write_manifest, array, place, value):
    """Even if the hash matches: it detects damage, not malice."""
    with h5py.File(clustered / INDEX, "r+") as file:
        file[array][place] = file[array][place - 1] if value == "same" else value
    write_manifest(clustered, updated_manifest(clustered))
    assert_found(clustered)


def test_another_number_of_clusters_than_the_manifest_s_is_found(clustered, write_manifest):
    write_manifest(clustered, updated_manifest(clustered, clusters=3))
    assert_found(clustered)


@pytest.mark.parametrize("name", ["offsets", "members"])
@pytest.mark.parametrize("how", ["absent", "link", "chunked", "signed", "shorter"])
def test_an_index_with_another_structure_is_rejected(clustered, write_manifest, name, how):
    with h5py.File(clustered / INDEX, "r+") as file:
        numbers = file[name][:]
        del file[name]
        if how == "link":
            file[name] = h5py.ExternalLink("other.h5", f"/{name}")
        elif how != "absent":
            kind = "<i8" if how == "signed" else "<u8"
            numbers = numbers[:-1] if how == "shorter" else numbers
            file.create_dataset(name, data=numbers.astype(kind), chunks=how == "chunked" or None)
    write_manifest(clustered, updated_manifest(clustered))
    assert_found(clustered)


OTHERS = ("../clusters.h5", "valid/clusters.h5", "train/shard-00000.h5")
DAMAGED: list[dict | None] = [{"file": name} for name in OTHERS]
DAMAGED += [{"clusters": -1}, {"clusters": "3"}, {"sha256": "x"}, None]


@pytest.mark.parametrize("change", DAMAGED)
def test_a_damaged_or_missing_entry_of_the_manifest_is_rejected(clustered, write_manifest, change):
    fields = json.loads(updated_manifest(clustered, **(change or {})))
    if change is None:
        del fields["clusters"]["indexes"]["valid"]
    write_manifest(clustered, json.dumps(fields))
    with pytest.raises(InputDataError, match=r"manifest\.json is damaged"):
        open_clusters(clustered, "train")


@pytest.mark.parametrize("told", ["15 clusters instead of 16", "clusters is missing or a link"])
def test_other_clusters_of_a_shard_are_rejected(clustered, trust, told):
    shard = clustered / "train/shard-00001.h5"
    with h5py.File(shard, "r+") as file:
        numbers = file["clusters"][:-1]
        del file["clusters"]
        file["clusters"] = h5py.ExternalLink("x.h5", "/clusters") if "link" in told else numbers
    trust(clustered, "train/shard-00001.h5")
    with pytest.raises(InputDataError, match=rf"{shard}.*{told}"):
        open_split(clustered, "train")
