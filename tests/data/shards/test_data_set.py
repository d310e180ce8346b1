"""Data sets on disk and their manifests: reproducible, verified, and read as documented."""

import json
import os
import pickle
import re
import subprocess
from functools import cache, lru_cache
from pathlib import Path

import h5py
import numpy as np
import pytest

from protlm.data.shards import data_set as reader_module
from protlm.data.shards import mapped_shard
from protlm.data.shards.data_set import open_split, read_manifest, verify
from protlm.data.shards.manifest import MANIFEST, MANIFEST_SHA256
from protlm.data.vocabulary import VOCABULARY
from protlm.system.errors import InputDataError, UserError
from protlm.system.paths import sha256_of, shipped
from tests.fixtures.commands import run_python

DOCUMENT = shipped("conf").parent / "docs" / "shards.md"
SHARD = "train/shard-00001.h5"


@pytest.fixture
def change(write_manifest):
    """Edits the manifest of a data set."""

    def change(directory, edit):
        fields = json.loads((directory / MANIFEST).read_text())
        edit(fields)
        write_manifest(directory, json.dumps(fields))

    return change


def test_equal_input_gives_equal_bytes(make_data_set, proteins):
    one, other = make_data_set(proteins, "one"), make_data_set(proteins, "other")
    files = sorted(p.relative_to(one) for p in one.rglob("*") if p.is_file())
    assert len(files) == 6
    for file in files:
        assert (one / file).read_bytes() == (other / file).read_bytes()


def test_the_manifest_describes_the_data_set(data_set):
    for entries in read_manifest(data_set).splits.values():
        for entry in entries:
            path = data_set / entry.file
            assert entry.bytes == path.stat().st_size
            assert entry.sha256 == sha256_of(path)
            with h5py.File(path) as file:
                assert entry.residues == len(file["tokens"])
                assert entry.sequences == len(file["offsets"]) - 1


def test_the_error_for_a_missing_split_lists_the_others(data_set):
    with pytest.raises(UserError, match="train, valid"):
        open_split(data_set, "test")


@pytest.mark.parametrize("verify_by", ["full", "sizes"])
def test_a_split_without_sequences_is_rejected(data_set, change, verify_by):
    change(data_set, lambda fields: fields["splits"].update(test=[]))
    with pytest.raises(InputDataError, match=r"the split test of .* is empty"):
        open_split(data_set, "test", verify=verify_by)


@pytest.mark.parametrize(
    ("array", "number", "told"),
    [
        *(("tokens", n, "damaged (a token is not a residue)") for n in (2, 32, 33, 255)),
        ("offsets", -1, "not a shard of protlm (the offsets decrease)"),
        ("id_offsets", -1, "not a shard of protlm (the offsets decrease)"),
    ],
)
def test_numbers_that_cannot_be_are_found(data_set, trust, array, number, told):
    """Tokens such as <eos> and <mask>, and offsets behind later ones."""
    with h5py.File(data_set / SHARD, "r+") as file:
        file[array][2] = file[array][-1] if number < 0 else number
    trust(data_set, SHARD)
    fault = f"the shard {data_set / SHARD} is {told}"
    assert verify(data_set) == [fault]
    with pytest.raises(InputDataError, match=re.escape(fault)):
        open_split(data_set, "train")


# --- the documented format


def documented(words):
    """The block of code that contains the words."""
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (code,) = (block for block in blocks if words in block)
    return code


def test_the_documented_reader_returns_the_sequences(data_set, proteins):
    """The example of docs/shards.md with only h5py."""
    code, found = documented("import h5py"), []
    for entry in read_manifest(data_set).splits["train"]:
        names = {"__name__": "documented"}
        exec(code.replace("DIR/train/shard-00000.h5", str(data_set / entry.file)), names)
        found += names["sequences"]
    assert found == proteins


def test_the_documented_check_finds_damage(data_set):
    """The example of docs/shards.md with only the standard library."""
    code = documented("import hashlib").replace('"DIR"', repr(str(data_set)))
    exec(code, {})
    path = data_set / SHARD
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(AssertionError):
        exec(code, {})


def test_the_documented_letters_are_the_vocabulary_s():
    text = DOCUMENT.read_text()
    letters = re.search(r'LETTERS = "([A-Z]+)"', text)[1]
    assert [VOCABULARY[letter] for letter in letters] == list(range(4, 29))
    tokens = re.search(r"^    (<cls>.*<mask>)$", text, re.MULTILINE)[1].split()
    assert tuple(tokens) == VOCABULARY.tokens
    assert VOCABULARY.hash in text


def test_the_documented_keys_are_the_manifest_s(make_data_set, proteins):
    data_set = make_data_set(proteins, clusters=range(len(proteins)))
    text = DOCUMENT.read_text().partition("## The manifest")[2]
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    keys = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert keys == set(json.loads((data_set / MANIFEST).read_text()))


def descriptors() -> int:
    """How many of shards this process has open."""
    return sum("shard-" in str(one.resolve()) for one in Path("/dev/fd").iterdir())


@pytest.mark.parametrize("shuffled", [True, False])
def test_sequences_are_read_as_written(data_set, proteins, shuffled):
    reader = open_split(data_set, "train", shuffled=shuffled)
    assert len(reader) == len(proteins)
    for index, (identifier, sequence) in enumerate(proteins):
        assert VOCABULARY.decode(reader[index]) == sequence
        assert reader.identifier(index) == identifier
    # As views that cannot be written to.
    assert reader[3].dtype == np.uint8 and reader[3].base is not None
    with pytest.raises(ValueError, match="read-only"):
        reader[3][0] = 0


@pytest.mark.parametrize("index", [-1, 40, 10**9])
def test_indices_out_of_range_are_errors(data_set, index):
    reader = open_split(data_set, "train")
    with pytest.raises(IndexError):
        reader[index]
    with pytest.raises(IndexError):
        reader.lengths_of(np.array([3, index]))


def test_lengths_are_those_of_the_requested_sequences(data_set, proteins):
    reader = open_split(data_set, "train")
    lengths = np.array([len(sequence) for _, sequence in proteins])
    for samples in ([], [39], [0, 39, 0, 16, 15], range(40), reversed(range(40))):
        asked = np.array(list(samples), dtype=np.int64)
        found = reader.lengths_of(asked)
        assert found.dtype == np.int64
        assert found.tolist() == lengths[asked].tolist()
    assert reader.length_counts().tolist() == np.bincount(lengths).tolist()


def test_only_the_requested_shards_are_opened_by_hdf5_and_once(data_set, monkeypatch):
    opened, find = [], mapped_shard.find_arrays
    places = cache(lambda path, entry: opened.append(path) or find(path, entry))
    monkeypatch.setattr(reader_module, "_places", places)
    # Every use maps a shard again.
    monkeypatch.setattr(reader_module, "_mapped", reader_module._mapped.__wrapped__)
    reader = open_split(data_set, "train", verify="sizes")
    assert opened == []
    reader.lengths_of(np.array([20, 16, 31]))
    assert len(reader[17]) and len(reader[21])
    assert opened == [data_set / SHARD]
    reader[3]
    assert len(opened) == 2


def test_a_pickled_reader_contains_no_maps(data_set, proteins):
    reader = open_split(data_set, "train")
    assert reader.lengths_of(np.array([0])) == [len(reader[0])]
    packed = pickle.dumps(reader)
    assert len(packed) < 2_000
    assert VOCABULARY.decode(pickle.loads(packed)[39]) == proteins[39][1]


def test_readers_share_the_maps_of_a_process(make_data_set, monkeypatch):
    monkeypatch.setattr(reader_module, "_mapped", lru_cache(5)(reader_module._mapped.__wrapped__))
    proteins = [(f"P{i}", "MKV" * (i + 1)) for i in range(16 * 30)]
    readers = [
        open_split(make_data_set(proteins, name), "train", verify="sizes") for name in ("a", "b")
    ]
    before = descriptors()
    for index in np.random.default_rng(0).permutation(len(proteins)).tolist():
        for reader in readers:
            assert VOCABULARY.decode(reader[index]) == proteins[index][1]
        assert descriptors() <= before + 5
    assert readers[0].lengths_of(np.arange(len(proteins)))[-1] == 3 * len(proteins)
    assert descriptors() <= before + 5


@pytest.mark.slow
def test_two_thousand_shards_do_not_exhaust_descriptors(data_set, change):
    """With no more than 256 descriptors, of which Python keeps one for each memory map."""
    files = [f"train/shard-{number}.h5" for number in range(10_000, 12_000)]
    for file in files:
        (data_set / file).symlink_to("shard-00000.h5")

    def repeat(fields):
        first = fields["splits"]["train"][0]
        fields["splits"]["train"] = [first | {"file": file} for file in files]

    change(data_set, repeat)
    run_python(Path(__file__).parent / "programs" / "read_many_shards.py", data_set)


# --- offsets that lead astray, in a shard whose hash is right


@pytest.mark.parametrize(
    "offset, astray",
    [(0, [17]), (2**63, [17, 18]), (2**64 - 1, [17, 18]), (-1, [18])],
    ids=["back", "huge", "largest", "end"],
)
def test_offsets_are_checked_where_they_are_used(data_set, trust, offset, astray):
    with h5py.File(data_set / SHARD, "r+") as file:
        for name in ("offsets", "id_offsets"):
            file[name][2] = file[name][offset] if offset in (0, -1) else np.uint64(offset)
    trust(data_set, SHARD)
    with pytest.raises(InputDataError, match=re.escape(SHARD)):
        open_split(data_set, "train")
    reader = open_split(data_set, "train", verify="sizes")
    assert (reader.lengths_of(np.array([0, 15, 16, 19, 39])) > 0).all()
    uses = [(reader.length_counts,)]
    for bad in astray:
        uses += [(reader.__getitem__, bad), (reader.identifier, bad)]
        uses += [(reader.lengths_of, np.array([0, bad, 39]))]
    for use, *arguments in uses:
        with pytest.raises(InputDataError, match=re.escape(str(data_set / SHARD))):
            use(*arguments)


def test_a_shard_that_is_truncated_under_a_reader_is_named(data_set):
    """Its process, which a read beyond the end would kill, ends with a sentence."""
    split = open_split(data_set, "train")
    assert len(split[0])
    path = data_set / "train/shard-00000.h5"
    os.truncate(path, 100)
    for use, asked in (
        (split.__getitem__, 0),
        (split.identifier, 0),
        (split.lengths_of, np.array([0])),
    ):
        with pytest.raises(InputDataError, match=f"{path} was truncated while .* 100 bytes"):
            use(asked)
    assert "has 100 bytes" in split.size_fault()


def test_a_round_trip_changes_nothing(data_set, tmp_path):
    manifest = read_manifest(data_set)
    manifest.write(tmp_path)
    assert (tmp_path / MANIFEST).read_bytes() == (data_set / MANIFEST).read_bytes()
    assert read_manifest(tmp_path) == manifest
    # Others can check it.
    check = ["sha256sum", "--strict", "--check", MANIFEST_SHA256]
    assert subprocess.run(check, cwd=data_set, check=False).returncode == 0


def test_the_error_for_a_missing_manifest_says_what_to_type(tmp_path):
    for directory in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match="give the path of a data set, such as protlm prepare"):
            read_manifest(directory)


# What a manifest may name as a shard by mistake or malice.
@pytest.mark.parametrize(
    "file",
    [
        *("../train/shard-00000.h5", "/etc/passwd", "train/../../shard-00000.h5", "train/evil.h5"),
        *("train//shard-00000.h5", "train/shard-00000.h5\n", "valid/shard-00000.h5", "", None),
        ["train/shard-00000.h5"],
    ],
)
def test_paths_outside_the_data_set_are_rejected(data_set, change, file):
    change(data_set, lambda fields: fields["splits"]["train"][0].update(file=file))
    with pytest.raises(InputDataError, match=re.escape(str(data_set / MANIFEST))):
        read_manifest(data_set)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "3", '"x"', "{}", "[" * 100_000, "\x00", '{"format": []}']
)
def test_text_that_is_not_a_manifest_is_a_user_error(data_set, write_manifest, text):
    write_manifest(data_set, text)
    with pytest.raises(UserError, match=re.escape(str(data_set / MANIFEST))):
        read_manifest(data_set)


@pytest.mark.parametrize("key", ["format", "format_version", "vocabulary"])
def test_another_version_or_vocabulary_is_rejected(data_set, change, key):
    change(data_set, lambda fields: fields.update({key: "other"}))
    with pytest.raises(UserError, match="make it again with protlm prepare"):
        read_manifest(data_set)


@pytest.mark.parametrize("file", [MANIFEST, MANIFEST_SHA256])
def test_an_unreadable_manifest_is_a_user_error(data_set, file):
    (data_set / file).unlink()
    if file == MANIFEST_SHA256:
        with pytest.raises(InputDataError, match=r"no manifest\.json\.sha256 next to it"):
            read_manifest(data_set)
    (data_set / file).mkdir()
    with pytest.raises(InputDataError, match=re.escape(file)):
        read_manifest(data_set)


@pytest.mark.parametrize("name", ["..", "a/b", "", "Train", "a b"])
def test_invalid_split_names_are_rejected(data_set, change, name):
    def rename(fields):
        shards = fields["splits"].pop("train")
        shards[0]["file"] = f"{name}/shard-00000.h5"
        fields["splits"][name] = shards

    change(data_set, rename)
    with pytest.raises(InputDataError):
        read_manifest(data_set)


def leaves(value, path=()):
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from leaves(inner, (*path, key))


@pytest.mark.parametrize("junk", [None, -1, "junk", [], {}, [[]], 1.5])
def test_junk_in_any_field_is_a_user_error_or_harmless(data_set, write_manifest, junk):
    original = (data_set / MANIFEST).read_text()
    for path in leaves(json.loads(original)):
        fields = spoiled = json.loads(original)
        for key in path[:-1]:
            spoiled = spoiled[key]
        spoiled[path[-1]] = junk
        write_manifest(data_set, json.dumps(fields))
        try:
            read_manifest(data_set)
        except UserError:
            continue
        harmless = {"split_rule", "tool_version", "counts", "sources", "splits", "file"}
        assert harmless & {str(key) for key in path}, path
