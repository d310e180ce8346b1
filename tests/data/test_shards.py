"""Shards: byte-identical, verified, read back, refused when foreign or damaged."""

import json
import os
import pickle
import re
import shutil

import h5py
import numpy as np
import pytest

from protlm.data.manifest import MANIFEST
from protlm.data.shards import SplitReader, open_split, read_manifest, verify
from protlm.data.vocabulary import VOCABULARY
from protlm.errors import InputDataError, UserError
from protlm.paths import sha256_of

SHARD = "train/shard-00001.h5"


def test_sequences_come_back(data_set, proteins):
    reader = open_split(data_set, "train")
    assert len(reader) == len(proteins)
    assert reader.lengths.dtype == np.int64
    assert reader.lengths.tolist() == [len(sequence) for _, sequence in proteins]
    for index, (identifier, sequence) in enumerate(proteins):
        assert VOCABULARY.decode(reader[index]) == sequence
        assert reader.identifier(index) == identifier


def test_sequences_are_views_that_cannot_be_written_to(data_set):
    tokens = open_split(data_set, "train")[3]
    assert tokens.dtype == np.uint8
    assert tokens.base is not None
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 0


@pytest.mark.parametrize("index", [-1, 40, 10**9])
def test_there_is_no_sequence_outside(data_set, index):
    with pytest.raises(IndexError):
        open_split(data_set, "train")[index]


def test_readers_open_nothing_until_asked(data_set):
    entries = read_manifest(data_set).splits["train"]
    shutil.rmtree(data_set / "train")
    reader = SplitReader(data_set, entries)
    with pytest.raises(InputDataError, match="missing"):
        reader[0]


def test_a_pickled_reader_takes_no_maps_along(data_set, proteins):
    reader = open_split(data_set, "train")
    before = len(pickle.dumps(reader))
    assert reader.lengths[0] == len(reader[0])
    assert len(pickle.dumps(reader)) == before
    other = pickle.loads(pickle.dumps(reader))
    assert VOCABULARY.decode(other[39]) == proteins[39][1]


def test_another_process_maps_anew(data_set, monkeypatch):
    reader = open_split(data_set, "train")
    mine = reader[0]
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    assert not np.shares_memory(reader[0], mine)
    assert (reader[0] == mine).all()


def test_equal_input_gives_equal_bytes(make_data_set, proteins):
    one, other = make_data_set(proteins, "one"), make_data_set(proteins, "other")
    files = sorted(p.relative_to(one) for p in one.rglob("*") if p.is_file())
    assert len(files) == 5
    for file in files:
        assert (one / file).read_bytes() == (other / file).read_bytes()


def test_shards_hold_no_times(data_set):
    with h5py.File(data_set / SHARD) as file:
        for name in file:
            assert not file[name].id.get_create_plist().get_obj_track_times()


def test_the_manifest_tells_what_is_there(data_set):
    for entries in read_manifest(data_set).splits.values():
        for entry in entries:
            path = data_set / entry.file
            assert entry.bytes == path.stat().st_size
            assert entry.sha256 == sha256_of(path)
            with h5py.File(path) as file:
                assert entry.residues == len(file["tokens"])
                assert entry.sequences == len(file["offsets"]) - 1


def test_what_is_well_has_no_faults(data_set):
    (data_set / "report.json").touch()
    (data_set / "rejected.tsv").touch()
    assert verify(data_set) == []


def test_a_split_that_is_not_there_names_those_that_are(data_set):
    with pytest.raises(UserError, match="train, valid"):
        open_split(data_set, "test")
    with pytest.raises(UserError, match="full, sizes"):
        open_split(data_set, "train", verify="none")


# --- damage


def assert_found(directory, shard=SHARD):
    """Both the check and the opening of the split name the shard."""
    name = re.escape(str(directory / shard))
    with pytest.raises(InputDataError, match=name):
        open_split(directory, "train")
    assert any(re.search(name, fault) for fault in verify(directory))


def test_a_flipped_bit_is_found(data_set):
    path = data_set / SHARD
    content = path.read_bytes()
    for offset in np.random.default_rng(0).integers(0, len(content), 50):
        flipped = bytearray(content)
        flipped[offset] ^= 1 << (offset % 8)
        path.write_bytes(flipped)
        assert_found(data_set)


@pytest.mark.parametrize("size", [0, 1, 100, -1])
def test_a_truncated_shard_is_found_by_its_size(data_set, size):
    path = data_set / SHARD
    path.write_bytes(path.read_bytes()[:size])
    assert_found(data_set)
    with pytest.raises(InputDataError, match="bytes"):
        open_split(data_set, "train", verify="sizes")


def test_a_missing_shard_is_found(data_set):
    (data_set / SHARD).unlink()
    assert_found(data_set)
    with pytest.raises(InputDataError, match="missing"):
        open_split(data_set, "train", verify="sizes")


def test_swapped_shards_are_found(make_data_set):
    # The same lengths in another order, so that nothing but the content tells.
    directory = make_data_set([(f"P{i:02}", "MKVL"[i % 4] * 9) for i in range(32)])
    one, other, aside = directory / "train/shard-00000.h5", directory / SHARD, directory / "x"
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
    assert_found(directory, "train/shard-00000.h5")
    assert len(verify(directory)) == 2


def test_an_extra_file_is_found_by_the_check(data_set):
    extra = data_set / "train" / "shard-00003.h5"
    shutil.copy(data_set / SHARD, extra)
    assert verify(data_set) == [f"{extra} is not in the manifest"]


# --- files that are not ours, with a manifest that says they are


def vouch(directory, shard=SHARD):
    """Makes the manifest agree with a shard, whatever it is."""
    path = directory / MANIFEST
    fields = json.loads(path.read_text())
    for entry in fields["splits"]["train"]:
        if entry["file"] == shard:
            entry.update(bytes=(directory / shard).stat().st_size)
            entry.update(sha256=sha256_of(directory / shard))
    path.write_text(json.dumps(fields))


def external(file, tokens):
    secret = file.filename + ".secret"
    with open(secret, "wb") as out:  # noqa: PTH123
        out.write(bytes(len(tokens)))
    file.create_dataset("tokens", tokens.shape, "u1", external=[(secret, 0, len(tokens))])


def virtual(file, tokens):
    layout = h5py.VirtualLayout(tokens.shape, "u1")
    layout[:] = h5py.VirtualSource("/etc/passwd", "data", tokens.shape)
    file.create_virtual_dataset("tokens", layout)


def soft_link(file, tokens):
    file["elsewhere"] = tokens
    file["tokens"] = h5py.SoftLink("/elsewhere")


def external_link(file, tokens):
    file["tokens"] = h5py.ExternalLink("other.h5", "/tokens")


def chunked(file, tokens):
    file.create_dataset("tokens", data=tokens, chunks=(10,))


def compressed(file, tokens):
    file.create_dataset("tokens", data=tokens, compression="gzip")


def compact(file, tokens):
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_layout(h5py.h5d.COMPACT)
    space = h5py.h5s.create_simple((10,))
    h5py.h5d.create(file.id, b"tokens", h5py.h5t.STD_U8LE, space, layout)


def group(file, tokens):
    file.create_group("tokens")


def strings(file, tokens):
    file.create_dataset("tokens", data=["M"] * 10, dtype=h5py.string_dtype())


def wide(file, tokens):
    file["tokens"] = tokens.astype("u2")


def matrix(file, tokens):
    file["tokens"] = tokens[None]


def nothing(file, tokens):
    pass


def claims_64_gib(file, tokens):
    file.create_dataset("tokens", (1 << 36,), "u1", fillvalue=0)


def short(file, tokens):
    file["tokens"] = tokens[:-1]


@pytest.mark.parametrize(
    "foreign",
    [
        external, virtual, soft_link, external_link, chunked, compressed, compact, group, strings,
        wide, matrix, nothing, claims_64_gib, short,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_foreign_tokens_are_refused(data_set, foreign):
    path = data_set / SHARD
    with h5py.File(path, "r+") as file:
        tokens = file["tokens"][:]
        del file["tokens"]
        foreign(file, tokens)
    assert_found(data_set)
    vouch(data_set)
    assert any(str(path) in fault for fault in verify(data_set))
    reader = open_split(data_set, "train")
    with pytest.raises(InputDataError, match=re.escape(str(path))):
        reader[20]


@pytest.mark.parametrize("name", ["offsets", "id_offsets"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda offsets: offsets[:-1],
        lambda offsets: offsets + np.uint64(1),
        lambda offsets: np.where(np.arange(len(offsets)) == 2, offsets[-1], offsets),
        lambda offsets: np.where(np.arange(len(offsets)) == 2, np.uint64(2**63), offsets),
        lambda offsets: offsets.astype(np.int64),
        lambda offsets: offsets.astype(">u8"),
    ],
    ids=["fewer", "beyond", "back", "huge", "signed", "big-endian"],
)
def test_offsets_that_lead_astray_are_refused(data_set, name, spoil):
    with h5py.File(data_set / SHARD, "r+") as file:
        offsets = file[name][:]
        del file[name]
        file[name] = spoil(offsets)
    vouch(data_set)
    assert any(SHARD in fault for fault in verify(data_set))
    with pytest.raises(InputDataError, match=re.escape(SHARD)):
        open_split(data_set, "train").lengths  # noqa: B018


def test_tokens_that_are_no_residues_are_found_by_the_check(data_set):
    for number in (VOCABULARY.mask, 33, 255):
        with h5py.File(data_set / SHARD, "r+") as file:
            file["tokens"][5] = number
        vouch(data_set)
        assert verify(data_set) == [
            f"the shard {data_set / SHARD} holds tokens that are no residues"
        ]


def test_the_documented_format_gives_the_sequences_back(data_set, proteins):
    """What docs/shards.md shows, with h5py alone."""
    from protlm.paths import conf_dir

    text = (conf_dir().parent / "docs" / "shards.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    code = code.replace("DIR/train/shard-00000.h5", "{path}")
    code += "    found.append((identifier, sequence))\n"
    found = []
    for entry in read_manifest(data_set).splits["train"]:
        exec(code.replace("{path}", str(data_set / entry.file)), {"found": found})
    assert found == proteins
