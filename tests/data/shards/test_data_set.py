"""Data sets on disk: reproducible, opened by manifest, verified, and read as documented."""

import json
import re

import h5py
import numpy as np
import pytest

from protlm.data.shards.data_set import open_split, read_manifest, verify
from protlm.data.shards.manifest import MANIFEST
from protlm.data.vocabulary import VOCABULARY
from protlm.system.errors import InputDataError, UserError
from protlm.system.paths import conf_dir, sha256_of

SHARD = "train/shard-00001.h5"
DOCUMENT = conf_dir().parent / "docs" / "shards.md"


def test_equal_input_gives_equal_bytes(make_data_set, proteins):
    one, other = make_data_set(proteins, "one"), make_data_set(proteins, "other")
    files = sorted(p.relative_to(one) for p in one.rglob("*") if p.is_file())
    assert len(files) == 6
    for file in files:
        assert (one / file).read_bytes() == (other / file).read_bytes()


def test_shards_contain_no_times(data_set):
    with h5py.File(data_set / SHARD) as file:
        for name in file:
            assert not file[name].id.get_create_plist().get_obj_track_times()


def test_the_manifest_describes_the_data_set(data_set):
    for entries in read_manifest(data_set).splits.values():
        for entry in entries:
            path = data_set / entry.file
            assert entry.bytes == path.stat().st_size
            assert entry.sha256 == sha256_of(path)
            with h5py.File(path) as file:
                assert entry.residues == len(file["tokens"])
                assert entry.sequences == len(file["offsets"]) - 1


def test_an_intact_data_set_has_no_faults(data_set):
    (data_set / "report.json").touch()
    (data_set / "rejected.tsv").touch()
    assert verify(data_set) == []


def test_the_error_for_a_missing_split_lists_the_others(data_set):
    with pytest.raises(UserError, match="train, valid"):
        open_split(data_set, "test")
    with pytest.raises(UserError, match="full, sizes"):
        open_split(data_set, "train", verify="none")


@pytest.mark.parametrize("verify_by", ["full", "sizes"])
def test_a_split_without_sequences_is_rejected(data_set, write_manifest, verify_by):
    fields = json.loads((data_set / MANIFEST).read_text())
    fields["splits"]["test"] = []
    write_manifest(data_set, json.dumps(fields))
    with pytest.raises(InputDataError, match=r"the split test of .* is empty"):
        open_split(data_set, "test", verify=verify_by)


@pytest.mark.parametrize("number", [VOCABULARY.mask, VOCABULARY.eos, 33, 255])
def test_tokens_that_are_not_residues_are_found(data_set, trust, number):
    with h5py.File(data_set / SHARD, "r+") as file:
        file["tokens"][5] = number
    trust(data_set, SHARD)
    fault = f"the shard {data_set / SHARD} is damaged (a token is not a residue)"
    assert verify(data_set) == [fault]
    with pytest.raises(InputDataError, match=re.escape(fault)):
        open_split(data_set, "train")


@pytest.mark.parametrize("name", ["offsets", "id_offsets"])
def test_decreasing_offsets_are_found(data_set, trust, name):
    with h5py.File(data_set / SHARD, "r+") as file:
        file[name][2] = file[name][-1]
    trust(data_set, SHARD)
    fault = f"the shard {data_set / SHARD} is not a shard of protlm (the offsets decrease)"
    assert verify(data_set) == [fault]
    with pytest.raises(InputDataError, match=re.escape(fault)):
        open_split(data_set, "train")


# --- the documented format


def code_blocks():
    return re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


def test_the_documented_reader_returns_the_sequences(data_set, proteins):
    """The example of docs/shards.md with only h5py."""
    (code,) = (block for block in code_blocks() if "import h5py" in block)
    code = code.replace("DIR/train/shard-00000.h5", "{path}")
    found: list[tuple[str, str]] = []
    for entry in read_manifest(data_set).splits["train"]:
        names = {"__name__": "documented"}
        exec(code.replace("{path}", str(data_set / entry.file)), names)
        found += names["sequences"]
    assert found == proteins


def test_the_documented_check_finds_damage(data_set):
    """The example of docs/shards.md with only the standard library."""
    (code,) = (block for block in code_blocks() if "import hashlib" in block)
    code = code.replace('"DIR"', repr(str(data_set)))
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
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert documented == set(json.loads((data_set / MANIFEST).read_text()))


def test_arrays_can_be_mapped_without_hdf5(data_set, proteins):
    with h5py.File(data_set / SHARD) as file:
        first = file["tokens"].id.get_offset()
        stop = int(file["offsets"][1])
    tokens = np.fromfile(data_set / SHARD, np.uint8, stop, offset=first)
    assert VOCABULARY.decode(tokens) == proteins[16][1]
