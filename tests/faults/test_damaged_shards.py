"""Shards that are damaged, foreign, missing or extra are named by verification and by training."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from protlm.build import open_data
from protlm.commands.data import verify as verify_command
from protlm.config import DataConfig
from protlm.data.shards import mapped_shard
from protlm.data.shards.data_set import open_split, verify
from protlm.data.shards.manifest import MANIFEST
from protlm.system.errors import InputDataError, UserError

SHARD = "train/shard-00001.h5"
FULL, BOTH = ("full",), ("full", "sizes")


def assert_refused(directory: Path, shard: str = SHARD, *, by: tuple[str, ...] = BOTH) -> None:
    """By `data verify`, by `data.verify=full` at opening, and by `sizes` before the first use."""
    path = re.escape(str(directory / shard))
    assert any(re.search(path, fault) for fault in verify(directory))
    with pytest.raises(InputDataError, match=f"{path}.*protlm data verify"):
        open_split(directory, "train", verify="full")
    if by == FULL:
        return
    for use in (
        lambda reader: reader[20],
        lambda reader: reader.identifier(20),
        lambda reader: reader.lengths_of(np.array([20])),
    ):
        with pytest.raises(InputDataError, match=path):
            use(open_split(directory, "train", verify="sizes"))


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(content)


def assert_found(directory: Path, path: Path, bit: int) -> None:
    """Flips a bit, asserts that the command and training find it, and flips it back."""
    flip(path, bit)
    named = str(path) if path.suffix == ".h5" else "manifest.json"
    for look in (verify_command, lambda directory: open_data(DataConfig(dir=str(directory)))):
        with pytest.raises(UserError) as raised:
            look(directory)
        assert named in str(raised.value), (path, bit)
    flip(path, bit)


@pytest.mark.parametrize("num_flips", [48, pytest.param(300, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_found(data_set, num_flips):
    rng = np.random.default_rng(0)
    files = sorted([*data_set.rglob("*.h5"), *data_set.glob("manifest.json*")])
    assert len(files) == 6
    for number in range(num_flips):
        # As many in each file, the small ones too.
        path = files[number % len(files)]
        assert_found(data_set, path, int(rng.integers(8 * path.stat().st_size)))
    # Flipped back, all is well.
    verify_command(data_set)
    open_data(DataConfig(dir=str(data_set)))


def flip_a_token(path: Path, bit: int) -> None:
    with h5py.File(path) as file:
        first, number = file["tokens"].id.get_offset(), file["tokens"].size // 2
    flip(path, 8 * (first + number) + bit)


@pytest.mark.parametrize("bit", [5, 6, 7])
def test_a_flipped_token_is_found_when_it_is_read(data_set, bit):
    """With `data.verify=sizes`, which reads no tokens at the start; residues are below 32."""
    path = data_set / "train" / "shard-00000.h5"
    flip_a_token(path, bit)
    split = open_split(data_set, "train", verify="sizes")
    with pytest.raises(InputDataError, match=f"the shard {path} .*protlm data verify {data_set}"):
        for index in range(len(split)):
            _ = split[index]


def test_a_loader_worker_names_the_shard_of_a_flipped_token(make_data_set, train):
    directory = make_data_set([(f"P{i:03}", "MKTAYIAK" * 4) for i in range(60)])
    for shard in (directory / "train").glob("*.h5"):
        flip_a_token(shard, 7)
    settings = [f"data.dir={directory}", "data.verify=sizes", "data.num_workers=2"]
    with pytest.raises(InputDataError, match=r"^the shard .*train/shard-.*protlm data verify") as e:
        train("run", *settings)
    assert "\n" not in str(e.value)


def test_rejected_training_writes_no_files(data_set, train, tmp_path):
    flip(data_set / SHARD, 8 * 1_000)
    with pytest.raises(InputDataError, match=f"{data_set / SHARD}.*protlm data verify"):
        train("run", f"data.dir={data_set}")
    assert not (tmp_path / "run").exists()


def content(given: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(given)


# What happens to a shard, and whether the manifest agrees with it.
SPOILED: dict[str, tuple[Callable[[Path], object], bool]] = {
    "empty": (content(b""), False),
    "cut short": (lambda path: os.truncate(path, path.stat().st_size - 1), False),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"\0"), False),
    "missing": (lambda path: path.unlink(), False),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), False),
    "empty, trusted": (content(b""), True),
    "the beginning of HDF5": (content(b"\x89HDF\r\n\x1a\n"), True),
    "empty HDF5": (content(b"\x89HDF\r\n\x1a\n" + bytes(4096)), True),
    "text": (content(b"MKV" * 99), True),
}


@pytest.mark.parametrize(("spoil", "is_trusted"), SPOILED.values(), ids=SPOILED)
def test_a_file_that_is_not_the_shard_is_refused(data_set, trust, spoil, is_trusted):
    spoil(data_set / SHARD)
    if is_trusted:
        trust(data_set, SHARD)
    assert_refused(data_set)


def test_swapped_shards(make_data_set):
    # The same lengths in another order, so that only the content differs.
    directory = make_data_set([(f"P{i:02}", "MKVL"[i % 4] * 9) for i in range(32)])
    one, other, aside = directory / "train/shard-00000.h5", directory / SHARD, directory / "x"
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
    assert one.stat().st_size == other.stat().st_size
    assert_refused(directory, "train/shard-00000.h5", by=FULL)
    assert len(verify(directory)) == 2


def external(file: h5py.File, tokens: np.ndarray) -> None:
    secret = Path(f"{file.filename}.secret")
    secret.write_bytes(bytes(len(tokens)))
    file.create_dataset("tokens", tokens.shape, "u1", external=[(str(secret), 0, len(tokens))])


def soft_link(file: h5py.File, tokens: np.ndarray) -> None:
    file["elsewhere"] = tokens
    file["tokens"] = h5py.SoftLink("/elsewhere")


def holding(value: Callable[[h5py.File, np.ndarray], object]) -> Callable:
    def make(file: h5py.File, tokens: np.ndarray) -> None:
        file["tokens"] = value(file, tokens)

    return make


def created(options: Callable[[np.ndarray], dict[str, object]]) -> Callable:
    return lambda file, tokens: file.create_dataset("tokens", **options(tokens))


# What takes the place of the tokens.
FOREIGN: dict[str, Callable[[h5py.File, np.ndarray], object]] = {
    "external": external,
    "soft link": soft_link,
    "group": lambda file, tokens: file.create_group("tokens"),
    "nothing": lambda file, tokens: None,
    "external link": holding(lambda *_: h5py.ExternalLink("other.h5", "/tokens")),
    "hard link to another array": holding(lambda file, tokens: file["ids"]),
    "wide": holding(lambda file, tokens: tokens.astype("u2")),
    "signed": holding(lambda file, tokens: tokens.astype("i1")),
    "matrix": holding(lambda file, tokens: tokens[None]),
    "null": holding(lambda *_: h5py.Empty("u1")),
    "shorter": holding(lambda file, tokens: tokens[:-1]),
    "chunked": created(lambda tokens: {"data": tokens, "chunks": (10,)}),
    "vlen": created(lambda tokens: {"shape": tokens.shape, "dtype": h5py.vlen_dtype(np.uint8)}),
    "enumeration": created(
        lambda tokens: {"data": tokens, "dtype": h5py.enum_dtype({"M": 1}, "u1")}
    ),
    "claims 64 GiB": created(lambda tokens: {"shape": (1 << 36,), "dtype": "u1", "fillvalue": 0}),
    "never written": created(lambda tokens: {"shape": tokens.shape, "dtype": "u1"}),
}


OFFSETS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "fewer": lambda offsets: offsets[:-1],
    "more": lambda offsets: np.append(offsets, offsets[-1]),
    "none": lambda offsets: offsets[:0],
    "beyond": lambda offsets: offsets + np.uint64(1),
    "signed": lambda offsets: offsets.astype(np.int64),
    "big-endian": lambda offsets: offsets.astype(">u8"),
    "float": lambda offsets: offsets.astype(np.float64),
}


ARRAYS = [("tokens", foreign) for foreign in FOREIGN.values()]
ARRAYS += [(name, spoil) for name in ("offsets", "id_offsets") for spoil in OFFSETS.values()]


@pytest.mark.parametrize(("name", "spoil"), ARRAYS, ids=[*FOREIGN, *OFFSETS, *OFFSETS])
def test_a_foreign_array_is_refused_before_data_are_read(data_set, trust, fail_at, name, spoil):
    """Although the manifest agrees with the file."""
    with h5py.File(data_set / SHARD, "r+") as file:
        values = file[name][:]
        del file[name]
        if name == "tokens":
            spoil(file, values)
        else:
            file[name] = spoil(values)
    trust(data_set, SHARD)
    for read in ("__getitem__", "read_direct"):
        fail_at(h5py.Dataset, read, AssertionError("data were read"))
    assert_refused(data_set)


def test_an_array_that_extends_beyond_the_file_is_refused(data_set, trust):
    path = data_set / SHARD
    with h5py.File(path) as file:
        arrays = {name: file[name][:] for name in file}
    # The oldest headers have no checksum.
    with h5py.File(path, "w", libver=("earliest", "v108")) as file:
        for name, values in arrays.items():
            file[name] = values
    true, claimed = (n.to_bytes(8, "little") for n in (len(arrays["tokens"]), 1 << 36))
    path.write_bytes(path.read_bytes().replace(true, claimed))
    trust(data_set, SHARD)
    assert_refused(data_set)


def test_another_number_of_residues_than_the_manifest_s_is_refused(data_set, write_manifest):
    fields = json.loads((data_set / MANIFEST).read_text())
    fields["splits"]["train"][1]["residues"] += 1
    write_manifest(data_set, json.dumps(fields))
    assert_refused(data_set)


def test_hdf5_sees_no_file_that_is_not_the_manifest_s(data_set, look_at):
    path = data_set / SHARD
    flip(path, 8 * 100)
    opened = []
    look_at(mapped_shard.h5py, "File", lambda path, *_, **__: opened.append(path))
    assert len(verify(data_set)) == 1
    with pytest.raises(InputDataError, match="SHA-256 differs"):
        open_split(data_set, "train", verify="full")
    path.write_bytes(path.read_bytes()[:-1])
    assert len(open_split(data_set, "valid", verify="sizes")[0]) == 3
    assert opened != []
    assert path not in opened
