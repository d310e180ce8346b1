"""Written shards: valid HDF5, the same bytes as HDF5's own, aligned, complete."""

import h5py
import numpy as np
import pytest

from protlm.data.shards.writer import PackedSequences, write_shard
from protlm.data.vocabulary import VOCABULARY
from protlm.system.errors import InputDataError, OutputError
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
    for number, length in enumerate(range(1, 130, 13)):
        write_shard(tmp_path, f"train/shard-{number:05d}.h5", [packed([("a", "M" * length)])])
        with h5py.File(tmp_path / f"train/shard-{number:05d}.h5") as file:
            assert [file[name].id.get_offset() % 64 for name in file] == [0] * 4


def test_the_division_into_parts_does_not_matter(tmp_path):
    one = write_shard(tmp_path, "a/shard-00000.h5", [packed(PAIRS)])
    other = write_shard(tmp_path, "b/shard-00000.h5", [packed([pair]) for pair in PAIRS])
    assert one.sha256 == other.sha256


def test_a_shard_without_identifiers_can_be_read(tmp_path):
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


def test_letters_that_are_not_residues_are_rejected():
    with pytest.raises(InputDataError, match="'-' at residue 2"):
        packed([("a", "M-V")])


def test_a_shard_is_never_overwritten(tmp_path):
    write_shard(tmp_path, FILE, [packed(PAIRS)])
    with pytest.raises(OutputError, match="exists"):
        write_shard(tmp_path, FILE, [packed(PAIRS)])
    assert [path.name for path in (tmp_path / "train").iterdir()] == ["shard-00000.h5"]
